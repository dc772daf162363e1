"""What ranks and agents say to each other: messages, HTTP, pulls."""
