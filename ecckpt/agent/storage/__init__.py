"""Where an agent keeps bytes: regions of memory in tmpfs, and files on disk."""
