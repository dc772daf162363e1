"""The tree of containers, values and registered objects around the tensors, as msgpack."""
