"""Creates a folder atomically: it is complete and synced, or it does not exist.

Both exports use it (``dcp/export.py``, ``safetensors/export.py``).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ecckpt.errors import InvalidConfig


def require_unused(folder: Path) -> None:
    """Raise ``InvalidConfig`` unless ``folder`` does not exist or is empty."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InvalidConfig(
            f"{folder} exists, and is not an empty folder", hint="export to a new one, or remove it"
        )


@contextmanager
def finished_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder``; at the end of the block, sync it and rename it.

    The caller fills it and syncs the files. After an error the new folder is removed. A killed
    process leaves ``.NAME.XXXXXXXX.unfinished``. Raises ``InvalidConfig`` if ``folder`` is in use.
    """
    require_unused(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.unfinished"
    unfinished.mkdir()
    try:
        yield unfinished
        _sync(unfinished)
        unfinished.rename(folder)  # replaces an empty folder; fails for one that is not empty
        _sync(folder.parent)  # the new name is durable only when the parent folder is synced
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
