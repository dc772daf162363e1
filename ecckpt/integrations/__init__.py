"""Adapters to other libraries, one file each; none sees another."""
