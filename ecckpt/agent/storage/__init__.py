"""Places that keep bytes: regions of memory and files on disk."""
