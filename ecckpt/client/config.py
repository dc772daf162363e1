"""Configuration: what must agree everywhere, and what may differ per node.

The only place that reads the environment. Below it everything is a keyword argument.
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
from ecckpt.format.ids import check_name
from ecckpt.memory.native import AUTO
from ecckpt.policy.placement import CodeSpec
from ecckpt.policy.retention import Keep


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The same on every rank of a run; checked when the ranks meet.

    ``min_margin``: a save counts as protected with k + min_margin fragments at their holders.
    ``save_timeout_s``: after that long without being committed, a save has failed.
    ``restore_timeout_s``: bounds every step of a restore in which ranks wait for each other.
    ``disk_every``: every nth committed save goes to the agents' disks, where they have some; 0:
    none does. ``keep``: which generations stay there.
    ``replicated``: patterns of plain tensors that are the same on all ranks.
    """

    run: str
    code: CodeSpec
    min_margin: int
    every_steps: int
    save_timeout_s: float
    restore_timeout_s: float
    disk_every: int = 1
    keep: Keep = field(default_factory=Keep)
    replicated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("run", self.run)
        if self.min_margin < 0:
            raise InvalidConfig(f"min_margin={self.min_margin} is negative")
        if self.every_steps < 1:
            raise InvalidConfig(f"every_steps={self.every_steps}: at least 1 is needed")
        if self.disk_every < 0:
            raise InvalidConfig(f"disk_every={self.disk_every} is negative")
        for name in ("save_timeout_s", "restore_timeout_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InvalidConfig(f"{name}={getattr(self, name)} is no usable time")

    def fingerprint(self) -> str:
        """Equal on two ranks exactly if they were configured alike."""
        return repr(self)


def named(patterns: Sequence[str]) -> tuple[str, ...]:
    """As a tuple; ``InvalidConfig`` for a text, whose letters would be the patterns."""
    if isinstance(patterns, str):
        raise InvalidConfig(f"{patterns!r} is a text", hint="give a list of texts")
    return tuple(patterns)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node: its agent's folder and how to start it where none runs."""

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
        """Settings of this node.

        ``ECCKPT_ROOT`` (default: /dev/shm/ecckpt-UID), ``ECCKPT_NODE`` (default: the host's name),
        ``ECCKPT_DOMAIN`` (default: the node itself), ``ECCKPT_LISTEN`` (default: 127.0.0.1:0),
        ``ECCKPT_TOKEN_FILE``, ``ECCKPT_ENGINE`` (of the codec; default: auto, the best one),
        ``ECCKPT_DISK`` (a folder on disk; default: none), and so that training has room:
        ``ECCKPT_CPUS`` (such as 0-3,8; default: all), ``ECCKPT_NICE`` (0 to 19; default: 0) and
        ``ECCKPT_PULL_MB_S`` (default: no limit). An argument beats the environment.
        """
        read = os.environ.get
        hostname = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "localhost"
        node = read("ECCKPT_NODE") or hostname
        token_file = read("ECCKPT_TOKEN_FILE")
        return cls(
            root=Path(root or read("ECCKPT_ROOT") or f"/dev/shm/ecckpt-{os.getuid()}"),  # noqa: S108
            node=check_name("node", node),
            domain=read("ECCKPT_DOMAIN") or node,
            listen=read("ECCKPT_LISTEN") or "127.0.0.1:0",
            token_file=Path(token_file) if token_file else None,
            engine=read("ECCKPT_ENGINE") or AUTO,
            disk=Path(disk) if (disk := read("ECCKPT_DISK")) else None,
            cpus=read("ECCKPT_CPUS") or "",
            nice=int(_number("ECCKPT_NICE", most=19)),
            pull_mb_s=_number("ECCKPT_PULL_MB_S", most=1e6),
        )

    def token(self) -> str:
        """The shared credential, or an empty string; ``InvalidConfig`` if the file is unusable."""
        return read_token(self.token_file)


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
        raise InvalidConfig(f"{name}={text!r} is no number from 0 to {most:g}")
    return number


def read_token(path: Path | None) -> str:
    """The credential in a file: at least 16 printable characters, readable by its owner only."""
    if path is None:
        return ""
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"token file {path}: {error}") from error
    if mode & 0o077:
        raise InvalidConfig(f"token file {path} can be read by others", hint=f"chmod 600 {path}")
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise InvalidConfig(
            f"token file {path}: {len(token)} characters, at least 16 printable ASCII ones needed"
        )
    return token
