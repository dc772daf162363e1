"""A simulated cluster in one thread: the real rules over simulated hosts, messages and trainers."""
