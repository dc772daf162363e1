"""The training process's side: save, restore, read, and what the command line does."""
