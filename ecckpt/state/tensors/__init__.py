"""Tensors: memory, dtypes, devices, placements, and the boxes that they are cut into."""
