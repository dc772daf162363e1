"""Places that keep bytes."""
