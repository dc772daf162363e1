"""Folders that only the current user can read, enter or change.

The agent checks its root folder and its folder on disk with it, and whatever starts an agent (the
client, ``ecckpt.testing``) checks the root folder first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ecckpt.errors import InvalidConfig


def private_folder(path: Path) -> Path:
    """Create ``path`` with mode 0700 if it is missing, and check that it is private; return it.

    Every user of a host can create files in /dev/shm. Without the check, a user who creates the
    folder first could read the checkpoints, or pose as the agent.

    Raises:
        InvalidConfig: the path belongs to another user, is a symbolic link, or gives other users
            any permission.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InvalidConfig(
            f"{path} is not private: owner {status.st_uid}, mode {status.st_mode & 0o7777:o}",
            hint="remove it, chmod 700 it, or give another --root",
        )
    return path
