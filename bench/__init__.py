"""Benchmarks: figures beside the physical limit of the same bytes, in the same run."""
