"""Whole runs, from outside the training: verify, repair, forget."""
