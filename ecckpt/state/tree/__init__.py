"""The tree of a state: its containers, values and objects around the tensors, as msgpack."""
