"""Reading a checkpoint without restoring it."""
