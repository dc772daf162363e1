"""Rules: who holds what, what survives, what may go. Pure."""
