"""Tensors: their memory, dtypes, devices and placements, and the boxes that ranks hold of them."""
