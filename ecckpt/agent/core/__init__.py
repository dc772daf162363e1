"""What an agent decides: events in, actions out. No I/O, no threads, no clock."""
