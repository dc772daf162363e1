"""From a shard back into a state: checked first, loaded all or nothing."""
