"""A cluster in one thread: the real rules, over a network, hosts and trainers that are made up."""
