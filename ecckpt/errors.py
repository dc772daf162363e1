"""Every exception of ecckpt: one base class, one level of subclasses.

A message says what happened, where, and with which numbers; ``hint`` says what to do about it and
is part of ``str(error)``. Subclasses also derive from the built-in class that callers would expect
(``ValueError`` for bad arguments, ``TimeoutError`` for deadlines, ``OSError`` for resources).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound="EcckptError")


class EcckptError(Exception):
    """Base of everything that ecckpt raises on purpose."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled between processes of one program. Subclasses take other arguments than a message,
        # so the default, which calls the class with ``args``, would fail.
        return _rebuilt, (type(self), str(self), vars(self))


def _rebuilt(kind: type[_Kind], message: str, attributes: Mapping[str, Any]) -> _Kind:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    vars(error).update(attributes)
    return error


def facts(error: EcckptError) -> dict[str, int]:
    """The whole numbers that an error carries, by attribute name."""
    return {name: value for name, value in vars(error).items() if type(value) is int}


def revive(name: str, message: str, numbers: Mapping[str, int]) -> EcckptError | None:
    """An error of another process, from its class name; None if this module has no such class.

    Only the text and whole numbers are taken over. Numbers that the other process left out are -1:
    it may be of another make, and its answer must not end this process by an ``AttributeError``.
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, EcckptError)):
        return None
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.hint = ""
    expected = inspect.signature(kind).parameters.values()
    missing = {each.name: -1 for each in expected if each.annotation == "int"}
    for attribute, value in {**missing, **numbers}.items():
        if attribute.isidentifier() and not hasattr(error, attribute):
            setattr(error, attribute, value)
    return error


# -- arguments ------------------------------------------------------------------------------------


class InvalidCode(EcckptError, ValueError):
    """A code (k, m), or a spelling of one, that cannot be used."""


class InvalidBuffer(EcckptError, ValueError):
    """A buffer of the wrong length, read-only where it is written, or overlapping another."""


class InvalidConfig(EcckptError, ValueError):
    """A name, address or limit that cannot be used."""


class TooFewNodes(EcckptError, ValueError):
    """The cluster has fewer nodes than the code needs."""

    def __init__(self, *, have: int, need: int, code: str) -> None:
        super().__init__(
            f"code {code} needs {need} nodes (k + m holders and the home), but there are {have}",
            hint='use code="auto" or a smaller code',
        )
        self.have, self.need = have, need


class TooFewAgents(EcckptError):
    """So few agents answered a start that another start could have the rest."""

    def __init__(self, run: str, *, have: int, need: int, nodes: int) -> None:
        super().__init__(
            f"run {run}: {have} of {nodes} agents answered, a start needs {need}",
            hint="two starts that reach different halves of the nodes must not both go on; bring "
            "agents up, or leave nodes that are gone for good out of agents=",
        )
        self.have, self.need = have, need


class DuplicateNode(EcckptError, ValueError):
    """Two agents have the same node id."""

    def __init__(self, node: str, addresses: Sequence[str]) -> None:
        super().__init__(
            f"node id {node!r} is claimed by {len(addresses)} agents: {', '.join(addresses)}",
            hint="give each agent its own --node",
        )
        self.node, self.addresses = node, tuple(addresses)


class TwoHistories(EcckptError, ValueError):
    """Several runs have the name that was asked for: jobs that did not know of each other.

    ``runs`` are their full names, each with where it was found.
    """

    def __init__(self, run: str, runs: Mapping[str, str]) -> None:
        found = ", ".join(f"{name} ({where})" for name, where in sorted(runs.items()))
        super().__init__(
            f"run {run!r} has {len(runs)} histories: {found}",
            hint=f'choose one by its full name, run="{min(runs)}"; ecckpt forget drops another',
        )
        self.runs = dict(runs)


class WrongOrder(EcckptError, RuntimeError):
    """A call that another call must precede."""


# -- bytes ----------------------------------------------------------------------------------------


class CorruptFragment(EcckptError):
    """A fragment, home copy or state file whose bytes are not those that were written."""


class VersionMismatch(EcckptError):
    """Bytes, or an agent, of another format version."""

    def __init__(self, where: str, *, found: int, known: int) -> None:
        super().__init__(
            f"{where} has format version {found}, this ecckpt knows {known}",
            hint="run the same ecckpt release on every node; nothing was changed or deleted",
        )
        self.found, self.known = found, known


class TooFewFragments(EcckptError):
    """Fewer good fragments than the shard of that rank needs."""

    def __init__(
        self, shard: str, *, rank: int, have: int, need: int, reasons: Sequence[str] = ()
    ) -> None:
        detail = f"; {'; '.join(reasons)}" if reasons else ""
        super().__init__(f"{shard}: {have} good fragments, {need} needed{detail}")
        self.rank, self.have, self.need, self.reasons = rank, have, need, tuple(reasons)


class InvalidMessage(EcckptError, ValueError):
    """A control message that does not follow the protocol."""


# -- agents and peers -----------------------------------------------------------------------------


class AgentUnreachable(EcckptError, ConnectionError):
    """An agent that does not answer, or not in time."""

    def __init__(self, address: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"agent {address}: {reason}", hint=hint)
        self.address, self.reason = address, reason


class TooSlow(EcckptError):
    """A pull that was given up because another source is faster, or that is no longer wanted."""

    def __init__(self, address: str, *, done_bytes: int, size_bytes: int) -> None:
        super().__init__(f"agent {address}: left behind after {done_bytes} of {size_bytes} bytes")
        self.address, self.done_bytes, self.size_bytes = address, done_bytes, size_bytes


class RequestRefused(EcckptError):
    """An agent understood a request and refused it."""

    def __init__(self, address: str, status: int, message: str) -> None:
        super().__init__(f"agent {address} refused ({status}): {message}")
        self.address, self.status, self.message = address, status, message


class AgentMismatch(EcckptError):
    """The agent that was found is not one that this run can use."""


class Fenced(EcckptError):
    """A writer of an older timeline or of another session, after others have begun theirs."""

    def __init__(self, *, timeline: int, current: int) -> None:
        super().__init__(
            f"timeline {timeline} is fenced off: timeline {current} has started",
            hint="this process was replaced by a restart and must end",
        )
        self.timeline, self.current = timeline, current


class OlderStart(EcckptError):
    """A start of a run that is older than the one that has the run by now."""

    def __init__(self, *, timeline: int, current: int) -> None:
        super().__init__(
            f"this start is refused: one that is younger than this one began timeline {current}",
            hint="this process must end; if it is the one that shall run, start it again",
        )
        self.timeline, self.current = timeline, current


class NotHeld(EcckptError, LookupError):
    """The agent does not have the file that was asked for."""


# -- memory ---------------------------------------------------------------------------------------


class MemoryBudgetTooSmall(EcckptError):
    """The run's memory budget on a node cannot hold what a save needs."""

    def __init__(self, node: str, *, need_bytes: int, have_bytes: int, what: str) -> None:
        super().__init__(
            f"node {node}: {what} needs {need_bytes:,} bytes of checkpoint memory, "
            f"the run's budget is {have_bytes:,}",
            hint="raise memory_bytes, or use a code with less overhead",
        )
        self.need_bytes, self.have_bytes = need_bytes, have_bytes


class TmpfsFull(EcckptError, OSError):
    """The tmpfs under an agent has no room for a region."""

    def __init__(self, path: str, *, need_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{path}: {need_bytes:,} bytes wanted, {free_bytes:,} free on that tmpfs",
            hint="ecckpt status lists runs and their age, ecckpt forget RUN drops one that "
            "is over; else enlarge the tmpfs (docker: --shm-size) or move the agent's --root",
        )
        self.need_bytes, self.free_bytes = need_bytes, free_bytes


class NotMapped(EcckptError, OSError):
    """The system does not let a process map memory, of a file or of its own.

    ``limit_bytes`` is the process's limit of address space (RLIMIT_AS), -1 if it has none.
    """

    def __init__(self, what: str, *, need_bytes: int, limit_bytes: int) -> None:
        limit = "no limit" if limit_bytes < 0 else f"a limit of {limit_bytes:,} bytes"
        super().__init__(
            f"{what}: the system does not map {need_bytes:,} more bytes; this process has {limit}",
            hint="see ulimit -v, vm.max_map_count and vm.overcommit_memory",
        )
        self.need_bytes, self.limit_bytes = need_bytes, limit_bytes


# -- disk -----------------------------------------------------------------------------------------


class DiskBudgetTooSmall(EcckptError):
    """The run's disk budget on a node cannot hold another file."""

    def __init__(self, node: str, *, need_bytes: int, have_bytes: int, what: str) -> None:
        super().__init__(
            f"node {node}: with {what} the run needs {need_bytes:,} bytes on disk, "
            f"its budget is {have_bytes:,}",
            hint="raise disk_bytes, or keep fewer generations",
        )
        self.need_bytes, self.have_bytes = need_bytes, have_bytes


class DiskFull(EcckptError, OSError):
    """The disk under an agent has no room for a file."""

    def __init__(self, path: str, *, need_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{path}: {need_bytes:,} bytes wanted, {free_bytes:,} free on that disk",
            hint="make room, keep fewer generations, or give the agent another --disk",
        )
        self.need_bytes, self.free_bytes = need_bytes, free_bytes


# -- state ----------------------------------------------------------------------------------------


class UnsupportedState(EcckptError, TypeError):
    """A part of the state cannot be stored; found at the first save."""

    def __init__(self, path: str, kind: str, *, hint: str) -> None:
        super().__init__(f"{path}: cannot store {kind}", hint=hint)
        self.path, self.kind = path, kind


class StateMismatch(EcckptError, ValueError):
    """A saved state does not fit the state that it is restored into; nothing was changed."""

    def __init__(self, problems: Sequence[str]) -> None:
        shown = "; ".join(problems[:20])
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(f"{len(problems)} mismatches: {shown}{more}")
        self.problems = tuple(problems)


class InvalidFolder(EcckptError, ValueError):
    """A folder of weights that is incomplete, was changed, or contradicts itself."""


# -- save and restore -----------------------------------------------------------------------------


class SaveFailed(EcckptError):
    """A save that did not reach its redundancy; the older generation is untouched."""


class SaveSkipped(SaveFailed):
    """A save that was not begun: the save before it, or its slot, was not ready in time.

    ``unfinished`` is the step of the save before, under way for ``age_s`` seconds; None if the slot
    was not ready.
    """

    def __init__(self, step: int, waits_for: str, *, unfinished: int | None, age_s: float) -> None:
        behind = f"the save of step {unfinished} is" if unfinished is not None else "its slot is"
        super().__init__(
            f"step {step} was skipped: {behind} not ready after {age_s:.2f} s, {waits_for}",
            hint="training goes on; save(..., patience_s=) waits longer where a save must be made",
        )
        self.step, self.unfinished, self.age_s = step, unfinished, age_s
        self.waits_for = waits_for


class SaveTimedOut(EcckptError, TimeoutError):
    """A save that did not finish before its deadline; the older generation is untouched."""


class NothingToRestore(EcckptError, LookupError):
    """No generation of the run can be rebuilt from the surviving files."""

    def __init__(self, run: str, rejected: Mapping[str, str], *, hint: str = "") -> None:
        detail = "; ".join(f"{name}: {why}" for name, why in rejected.items())
        super().__init__(
            f"run {run!r}: nothing to restore{': ' + detail if detail else ''}", hint=hint
        )
        self.rejected = dict(rejected)


class NodeCutOff(EcckptError, OSError):
    """A node cannot gather a shard that another node can; nothing older is restored for that."""

    def __init__(self, node: str, what: str, *, other: str, why: str) -> None:
        super().__init__(
            f"node {node} cannot gather {what}, and node {other} can: {why}",
            hint="its network may pass only small packets (MTU, cable, firewall): start without "
            "the node, or restore an older generation by name",
        )


class NoRoomToRestore(EcckptError, OSError):
    """A generation can be restored, but a node has no room for its shard."""


class RankTimeout(EcckptError, TimeoutError):
    """Ranks that did not answer in time when all of them had to agree."""

    def __init__(self, what: str, ranks: Sequence[int], *, timeout_s: float) -> None:
        shown = ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
        super().__init__(f"{what}: no answer from rank {shown} within {timeout_s:g} s")
        self.ranks, self.timeout_s = tuple(ranks), timeout_s
