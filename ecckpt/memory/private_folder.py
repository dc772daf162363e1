"""Folders that no other user of the host can reach into."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ecckpt.errors import InvalidConfig


def private_folder(path: Path) -> Path:
    """Make ``path`` if it is not there, and be sure that nobody else can reach into it.

    /dev/shm is open to all: whoever made the folder first could otherwise read, or be, the agent.
    Raises ``InvalidConfig`` if it is another user's, a link, or open to others.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InvalidConfig(
            f"{path} is not private: owner {status.st_uid}, mode {status.st_mode & 0o7777:o}",
            hint="remove it, chmod 700 it, or give another --root",
        )
    return path
