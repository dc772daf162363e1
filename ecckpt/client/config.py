"""Configuration: ``ClusterConfig`` is equal on all ranks of a run, ``NodeConfig`` differs by node.

``checkpointer.py``, ``cluster/``, the command line and ``ecckpt.testing`` use it. Only this module
reads the environment; everything else gets its settings as arguments.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ecckpt.errors import InvalidConfig
from ecckpt.format.ids import check_name, check_run
from ecckpt.memory.native import AUTO
from ecckpt.policy.placement import CodeSpec
from ecckpt.policy.retention import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Settings that must be equal on all ranks of a run; the ranks compare them when they join.

    Attributes:
        run: name of the run.
        code: k and m, or how to choose them.
        min_margin: a shard counts as protected when k + min_margin fragments are with their
            holders; None: when all are whose holders can be reached, and k at least.
        every_steps: ``due(step)`` is true for every nth step.
        save_timeout_s: a save that is not committed after so many seconds has failed.
        restore_timeout_s: limit of each step of a restore in which ranks wait for each other.
        disk_every: every nth committed save is stored on the disks of agents that have one; 0:
            none is.
        keep: which generations stay on the disks.
        replicated: patterns of plain tensors that are equal on all ranks.

    Raises:
        InvalidConfig: a value is out of range.
    """

    run: str
    code: CodeSpec
    min_margin: int | None
    every_steps: int
    save_timeout_s: float
    restore_timeout_s: float
    disk_every: int = 1
    keep: Keep = field(default_factory=Keep)
    replicated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_run(self.run)
        if self.min_margin is not None and self.min_margin < 0:
            raise InvalidConfig(f"min_margin={self.min_margin} is negative")
        if self.every_steps < 1:
            raise InvalidConfig(f"every_steps={self.every_steps}: at least 1 is needed")
        if self.disk_every < 0:
            raise InvalidConfig(f"disk_every={self.disk_every} is negative")
        for name in ("save_timeout_s", "restore_timeout_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InvalidConfig(f"{name}={getattr(self, name)} is not between 0 and 1e6 s")

    def fingerprint(self) -> str:
        """Return a text that is equal on two ranks if and only if their settings are."""
        return repr(self)


def named(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a tuple.

    Raises ``InvalidConfig`` for a single text, whose letters would become the patterns.
    """
    if isinstance(patterns, str):
        raise InvalidConfig(f"{patterns!r} is a text", hint="give a list of texts")
    return tuple(patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of one node: the folder of its agent, and how to start an agent.

    ``from_environment`` describes the fields. ``disk`` and ``token_file`` are None if there is
    none, ``cpus`` is empty for all CPUs, and ``pull_mb_s`` is in 10^6 bytes per second (0: no
    limit).
    """

    root: Path
    node: str
    domain: str
    listen: str
    token_file: Path | None
    engine: str = AUTO
    disk: Path | None = None
    cpus: str = ""
    nice: int = 0
    pull_mb_s: float = 0.0

    @classmethod
    def from_environment(cls, root: str | Path | None = None) -> Self:
        """Read the settings of this node from the environment; ``root`` overrides the variable.

        - ``ECCKPT_ROOT``: the agent's folder in a tmpfs (default: /dev/shm/ecckpt-UID)
        - ``ECCKPT_NODE``: the node's name, unique in the cluster (default: the host's name)
        - ``ECCKPT_DOMAIN``: the failure domain (default: the node's name)
        - ``ECCKPT_LISTEN``: host:port for peers (default: 127.0.0.1:0, any free port)
        - ``ECCKPT_TOKEN_FILE``: file with the shared credential (default: none)
        - ``ECCKPT_ENGINE``: of the codec (default: auto, the fastest one)
        - ``ECCKPT_DISK``: folder on a disk (default: none)
        - ``ECCKPT_CPUS``: CPUs that the agent runs on, such as 0-3,8 (default: all)
        - ``ECCKPT_NICE``: priority of the agent, 0 to 19 (default: 0)
        - ``ECCKPT_PULL_MB_S``: limit of pulls, in 10^6 bytes per second (default: 0, no limit)

        Raises ``InvalidConfig`` for values that cannot be used.
        """
        read = os.environ.get
        hostname = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "localhost"
        node = read("ECCKPT_NODE") or hostname
        token_file = read("ECCKPT_TOKEN_FILE")
        return cls(
            root=_lasting(root or read("ECCKPT_ROOT") or f"/dev/shm/ecckpt-{os.getuid()}"),  # noqa: S108
            node=check_name("node", node),
            domain=read("ECCKPT_DOMAIN") or node,
            listen=read("ECCKPT_LISTEN") or "127.0.0.1:0",
            token_file=_lasting(token_file) if token_file else None,
            engine=read("ECCKPT_ENGINE") or AUTO,
            disk=_lasting(disk) if (disk := read("ECCKPT_DISK")) else None,
            cpus=read("ECCKPT_CPUS") or "",
            nice=int(_number("ECCKPT_NICE", most=19)),
            pull_mb_s=_number("ECCKPT_PULL_MB_S", most=1e6),
        )

    def token(self) -> str:
        """Return the shared credential, or an empty string without a token file.

        Raises ``InvalidConfig`` if the file cannot be used.
        """
        return read_token(self.token_file)


def _lasting(path: str | Path) -> Path:
    """A path that means the same after a ``chdir``, and to an agent that runs elsewhere."""
    return Path(path).absolute()


def token_from_environment() -> str:
    """The credential in the file that ``ECCKPT_TOKEN_FILE`` names; empty if it names none."""
    path = os.environ.get("ECCKPT_TOKEN_FILE")
    return read_token(Path(path) if path else None)


def _number(name: str, *, most: float) -> float:
    text = os.environ.get(name) or "0"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise InvalidConfig(f"{name}={text!r} is not a number from 0 to {most:g}")
    return number


def read_token(path: Path | None) -> str:
    """Read a credential: at least 16 printable ASCII characters, readable by the owner only.

    Without a path it is the empty string. Raises ``InvalidConfig`` if the file cannot be used.
    """
    if path is None:
        return ""
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"token file {path}: {error}") from error
    if mode & 0o077:
        raise InvalidConfig(
            f"token file {path} is readable by other users", hint=f"chmod 600 {path}"
        )
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise InvalidConfig(
            f"token file {path}: {len(token)} characters, at least 16 printable ASCII ones needed"
        )
    return token
