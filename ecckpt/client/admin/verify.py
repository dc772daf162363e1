"""``ecckpt verify``: lets the agents check all blocks of a run, in memory and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ecckpt.errors import AgentUnreachable, EcckptError, NotHeld
from ecckpt.format.fragment_file import HOME, Header
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.fan_out import call_each
from ecckpt.protocol.messages.disk import Verify
from ecckpt.protocol.verbs import INVENTORY, VERIFY

_READ_BYTES_PER_S = 20e6  # a slow disk that other programs use as well; sets request timeouts
_PARALLEL_NODES = 64  # a request lasts as long as a node reads a file: more than ask for a moment


# The names of the fields are keys of `ecckpt verify --json`.
@dataclass(slots=True, kw_only=True)
class Checked:
    """The result of checking one node.

    Attributes:
        node: the node's name; the agent's address if it did not answer.
        files: number of files checked.
        total_bytes: their length.
        bad: a line for each fault.
        silent: why the agent did not answer; empty if it did.
    """

    node: str
    files: int = 0
    total_bytes: int = 0
    bad: list[str] = field(default_factory=list)
    silent: str = ""


def verify_run(run: str, agents: Sequence[AgentClient], *, bytes_per_s: int = 0) -> list[Checked]:
    """Check each block of each home copy and fragment of a run against its CRC32C.

    Args:
        run: name of the run.
        agents: they check at the same time.
        bytes_per_s: limit of what each agent reads; 0: no limit.

    Returns:
        A result per agent, in order. A file that an agent drops meanwhile, because a newer
        generation was committed, is not a fault.
    """
    return call_each(
        agents, lambda agent: _verify_node(run, agent, bytes_per_s), parallel=_PARALLEL_NODES
    )


def _verify_node(run: str, agent: AgentClient, bytes_per_s: int) -> Checked:
    checked = Checked(node=agent.address)
    try:
        inventory = agent.call(INVENTORY, run)
        checked.node = inventory.node
        for disk, headers in ((False, inventory.headers), (True, inventory.disk)):
            for header in headers:
                _verify_file(checked, agent, header, disk=disk, bytes_per_s=bytes_per_s)
        checked.bad += [f"not adopted: {name}: {why}" for name, why in inventory.rejected.items()]
    except (AgentUnreachable, OSError) as error:
        checked.silent = str(error)
    return checked


def _verify_file(
    checked: Checked, agent: AgentClient, header: Header, *, disk: bool, bytes_per_s: int
) -> None:
    message = Verify(header.shard, header.index, disk, bytes_per_s)
    what = "home copy" if header.index == HOME else f"fragment {header.index}"
    where = f"{what} of {header.shard} {'on disk' if disk else 'in memory'}"
    try:
        rate = min(bytes_per_s or _READ_BYTES_PER_S, _READ_BYTES_PER_S)
        # Twice the time that reading the file should take, beyond the timeout of any request.
        timeout_s = agent.timeout_s + 2 * header.file_bytes / rate
        verified = agent.call(VERIFY, message, timeout_s=timeout_s)
    except NotHeld:
        return
    except AgentUnreachable:
        raise
    except EcckptError as error:
        checked.bad.append(f"{where}: {error}")
        return
    checked.files += 1
    checked.total_bytes += header.file_bytes
    if verified.problem:
        checked.bad.append(f"{where}: {verified.problem}")
    if verified.bad:
        first = ", ".join(f"{block.index}/{block.row}" for block in verified.bad[:4])
        more = ", ..." if len(verified.bad) > 4 else ""
        checked.bad.append(
            f"{where}: {len(verified.bad)} blocks fail their CRC32C (fragment/row {first}{more})"
        )
