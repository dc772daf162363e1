"""Saving: slots, staging, commit, and the disks behind it."""
