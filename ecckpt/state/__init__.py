"""A rank's state and its shard: tensors, values and objects to one safetensors file and back."""
