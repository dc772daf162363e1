"""A folder of safetensors files as the first generation of a run: ``ecckpt import RUN DIR``."""

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
from ecckpt.format.ids import check_name
from ecckpt.integrations.safetensors.index import aliases_in, read_listing
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import INVENTORY

SAVE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Imported:
    """What was saved, and what may be lost without losing it."""

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
    """Save the tensors of ``folder`` as ``{"model": {name: tensor}}``, the state of a single rank.

    A restore of ``run`` into a module with these names takes them. ``root`` is the folder of this
    node's agent, which is started if none runs; ``agents`` are further ones to hold fragments.
    ``ties`` are names of tied tensors that the folder does not tell, to names that it has: a module
    has both, and is restored only from what has both.

    Raises:
        InvalidFolder: files that are missing, left over, changed or no safetensors files.
        InvalidConfig: the agents know the run already.
    """
    check_name("run", run)
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
            run, str(handle.generation), len(model), sum(distinct.values()), checkpointer.promise
        )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, tied ones tied; they look into the files and must not be written to.

    Raises ``InvalidFolder``; see ``read_listing``.
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
        # KeyError: a dtype that its format has and its loader has not.
        except (SafetensorError, OSError, KeyError) as error:
            raise InvalidFolder(f"{folder / file} cannot be read: {error!r}") from error
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def require_new(run: str, node: NodeConfig, agents: Sequence[str]) -> None:
    """Look before anything is fenced: a training job may be at work under this name."""
    find_or_start(node)
    token = node.token()
    peers = [AgentClient(address, token) for address in agents]
    for client in (local_client(node.root), *peers):
        inventory = client.call(INVENTORY, run)
        if inventory.headers or inventory.committed or inventory.fence:
            raise InvalidConfig(
                f"node {inventory.node} knows run {run!r} already", hint="import under a new name"
            )
