"""Restoring: choose a generation, bring the shards home, load on all ranks or none."""
