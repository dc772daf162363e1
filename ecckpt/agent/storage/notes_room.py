"""Room for notes in a tmpfs that another program has filled, with bytes or with files.

A restore needs notes (the new timeline) and nothing else of the tmpfs, so a checkpoint that is
whole in memory must not be lost for want of a page. A few small files hold that page and its inode:

    notes find no room --> one of the files is removed --> the notes take its place
    notes are written: the file that they replaced is gone --> the missing files are made again

Used by regions.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)

# More than one, because the other program may take a file's room before the notes do.
_FILES = 4
# The notes of a run are below 4 KiB unless it has hundreds of roll-backs or stored generations.
_FILE_BYTES = 32 << 10


def keep_room(folder: Path) -> None:
    """Make the files that are missing, as far as there is room now."""
    for path in _files(folder):
        if not path.exists():
            with contextlib.suppress(OSError):
                _make(path)


def give_room(folder: Path) -> bool:
    """Remove one of the files; False if there is none left."""
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            return True
    return False


def _files(folder: Path) -> list[Path]:
    return [folder / f"{number}.room" for number in range(_FILES)]


def _make(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
    except OSError:
        path.unlink()  # an empty file would look like room
        raise
    finally:
        os.close(descriptor)
