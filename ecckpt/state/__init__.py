"""A rank's state and its shard: tensors, values and objects to one safetensors file and back.

`plan_shard` and `ShardPlan.write` save; `read_shard`, `check` and `load` restore.
"""

from ecckpt.state.load import check, load
from ecckpt.state.plan import ShardPlan, plan_shard
from ecckpt.state.registry import register
from ecckpt.state.rng import RngState
from ecckpt.state.shard import Shard, read_shard
from ecckpt.state.sharding import Sharding

__all__ = [
    "RngState",
    "Shard",
    "ShardPlan",
    "Sharding",
    "check",
    "load",
    "plan_shard",
    "read_shard",
    "register",
]
