"""Imports a folder of safetensors files as a new run: ``ecckpt import RUN DIR``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from ecckpt.client.checkpointer import Checkpointer
from ecckpt.client.cluster.local_agent import find_or_start, local_client
from ecckpt.client.config import NodeConfig
from ecckpt.errors import InvalidConfig, InvalidFolder
from ecckpt.format.ids import check_run
from ecckpt.integrations.safetensors.index import aliases_in, read_listing
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import INVENTORY

# A large model takes minutes to copy and encode, and no training waits for it: an hour only ends an
# import that hangs.
SAVE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import. ``promise`` says in words which losses of nodes the run survives."""

    run: str
    generation: str
    tensors: int
    total_bytes: int
    promise: str


def import_safetensors(
    run: str,
    folder: Path,
    *,
    root: Path | None = None,
    agents: Sequence[str] = (),
    step: int = 0,
    ties: Mapping[str, str] | None = None,
) -> Imported:
    """Save the tensors of ``folder`` as the state ``{"model": {name: tensor}}`` of one rank.

    ``restore`` of the run then loads them into a module that has these names.

    Args:
        run: name of the run; the agents must not know it yet.
        folder: of safetensors files.
        root: folder of this node's agent, which is started if it does not run.
        agents: addresses of further agents, which hold fragments.
        step: the training step of the generation.
        ties: name of a tied tensor that the folder does not have -> name that it has. A module has
            both names, and a restore requires both.

    Raises:
        InvalidFolder: a file is missing, left over, changed, or not a safetensors file.
        InvalidConfig: an agent knows the run already, or a tie does not fit the folder.
    """
    check_run(run)
    model = read_weights(folder)
    for alias, name in (ties or {}).items():
        if name not in model or alias in model:
            raise InvalidConfig(
                f"{alias!r} cannot be tied to {name!r}",
                hint="the folder must have the second of them, and not the first",
            )
        model[alias] = model[name]
    require_new(run, NodeConfig.from_environment(root), agents)
    with Checkpointer(
        run,
        root=root,
        agents=agents,
        strict=True,
        save_timeout_s=SAVE_TIMEOUT_S,
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    ) as checkpointer:
        checkpointer.restore({"model": model})
        handle = checkpointer.save(step, {"model": model})
        handle.wait(SAVE_TIMEOUT_S)
        distinct = {tensor.data_ptr(): tensor.nbytes for tensor in model.values()}
        return Imported(
            run=run,
            generation=str(handle.generation),
            tensors=len(model),
            total_bytes=sum(distinct.values()),
            promise=checkpointer.promise,
        )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name; tied names have the same tensor.

    Tensors are views of the mapped files: do not write to them. Raises ``InvalidFolder``, as
    ``read_listing`` does.
    """
    listing = read_listing(folder)
    tensors: dict[str, torch.Tensor] = {}
    aliases = dict(listing.aliases)
    for file, names in listing.files.items():
        try:
            with safe_open(folder / file, framework="pt") as opened:
                present = dict.fromkeys(opened.keys())
                absent = [name for name in names if name not in present]
                if absent:
                    raise InvalidFolder(f"{folder / file} has no tensor {absent[0]!r:.80}")
                for name in names or present:
                    tensors[name] = opened.get_tensor(name)
                if not names:
                    aliases |= aliases_in(opened.metadata() or {}, present)
        # KeyError: a dtype that the safetensors format has, but its torch loader has not.
        except (SafetensorError, OSError, KeyError) as error:
            raise InvalidFolder(f"{folder / file} cannot be read: {error!r}") from error
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def require_new(run: str, node: NodeConfig, agents: Sequence[str]) -> None:
    """Raise ``InvalidConfig`` if an agent knows the run.

    It must be called before the Checkpointer restores: that fences older writers, and a training
    job under the same name could not save any more.
    """
    find_or_start(node)
    token = node.token()
    peers = [AgentClient(address, token) for address in agents]
    for client in (local_client(node.root), *peers):
        inventory = client.call(INVENTORY, run)
        if inventory.headers or inventory.committed or inventory.fence:
            raise InvalidConfig(
                f"node {inventory.node} knows run {run!r} already", hint="import under a new name"
            )
