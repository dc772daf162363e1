"""What an agent knows of each run: entries in memory, files on disk, notes, rejected files."""
