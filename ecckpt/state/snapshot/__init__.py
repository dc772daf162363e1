"""Saving a state: the plan of its shard, the copy into a slot, and checks of replicated tensors."""
