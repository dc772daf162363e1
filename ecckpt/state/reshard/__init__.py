"""From the shards of one number of ranks, mesh or placement to those of another."""
