"""A rank's state and its shard: from tensors, values and objects to one safetensors file, and back.

``snapshot`` writes a state into the memory of a shard, ``load`` fills a live state from a shard,
and ``reshard`` maps the shards of another number of ranks. ``file``, ``tree`` and ``tensors`` are
the parts that they share. ``client`` and ``integrations`` use this package; the agent does not.
"""
