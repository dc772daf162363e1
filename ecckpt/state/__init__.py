"""A rank's state and its shard: tensors, values and objects to one safetensors file and back.

`plan_shard` and `ShardPlan.write` save; `read_shard`, `check` and `load` restore; `reshape` makes
the shard to load from those of another number of ranks or another mesh.
"""

from ecckpt.state.load import check, load
from ecckpt.state.plan import ShardPlan, plan_shard
from ecckpt.state.registry import register
from ecckpt.state.replicas import Claim, Replicas
from ecckpt.state.reshape import Place, is_relaid, reshape
from ecckpt.state.rng import RngState
from ecckpt.state.saved import SavedShard
from ecckpt.state.shard import Shard, read_shard
from ecckpt.state.sharding import Sharding

__all__ = [
    "Claim",
    "Place",
    "Replicas",
    "RngState",
    "SavedShard",
    "Shard",
    "ShardPlan",
    "Sharding",
    "check",
    "is_relaid",
    "load",
    "plan_shard",
    "read_shard",
    "register",
    "reshape",
]
