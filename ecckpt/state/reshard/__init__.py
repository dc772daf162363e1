"""Resharding: shards of one number of ranks, mesh or placement as a shard of another."""
