"""The decisions of an agent: events in, actions out. No I/O, no threads, no clock."""
