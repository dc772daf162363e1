"""Having every file of a run checked by the agents that hold it: what ``ecckpt verify`` does."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ecckpt.errors import AgentUnreachable, EcckptError, NotHeld
from ecckpt.format.fragment_file import HOME, Header
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.disk import Verify
from ecckpt.protocol.verbs import INVENTORY, VERIFY

_READ_BYTES_PER_S = 20e6  # of a disk that others use as well


@dataclass(slots=True)
class Checked:
    """What was checked on one node.

    ``bad`` has a line for each fault; ``silent`` says why the agent did not answer, if it did not.
    """

    node: str
    files: int = 0
    total_bytes: int = 0
    bad: list[str] = field(default_factory=list)
    silent: str = ""


def verify_run(run: str, agents: Sequence[AgentClient], *, bytes_per_s: int = 0) -> list[Checked]:
    """Check every block of every home copy and fragment of a run, in memory and on disk.

    All agents at once, each reading at most ``bytes_per_s`` (0: as fast as it goes). A file that
    goes meanwhile, because something newer was committed, is no fault.
    """
    with ThreadPoolExecutor(min(64, len(agents)), thread_name_prefix="verify") as pool:
        return list(pool.map(lambda agent: _verify_node(run, agent, bytes_per_s), agents))


def _verify_node(run: str, agent: AgentClient, bytes_per_s: int) -> Checked:
    checked = Checked(agent.address)
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
        patience_s = agent.timeout_s + 2 * header.file_bytes / rate
        found = agent.call(VERIFY, message, timeout_s=patience_s)
    except NotHeld:
        return
    except AgentUnreachable:
        raise
    except EcckptError as error:
        checked.bad.append(f"{where}: {error}")
        return
    checked.files += 1
    checked.total_bytes += header.file_bytes
    if found.problem:
        checked.bad.append(f"{where}: {found.problem}")
    if found.bad:
        first = ", ".join(f"{each.index}/{each.row}" for each in found.bad[:4])
        more = ", ..." if len(found.bad) > 4 else ""
        checked.bad.append(
            f"{where}: {len(found.bad)} blocks fail their CRC32C (fragment/row {first}{more})"
        )
