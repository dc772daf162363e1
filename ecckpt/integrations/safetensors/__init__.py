"""Folders of safetensors weights, with an index."""
