"""From a state to the plan of its shard, and its copy."""
