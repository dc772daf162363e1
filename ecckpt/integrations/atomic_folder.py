"""A folder that is whole or not there."""

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
            f"{folder} is there, and no empty folder", hint="export to a new one, or remove it"
        )


@contextmanager
def finished_folder(folder: Path) -> Iterator[Path]:
    """A new folder to be filled, beside ``folder``; on leaving it is synced and moved there.

    Files in it must be synced by whoever writes them. After an error nothing is left; a kill leaves
    ``.NAME.XXXXXXXX.unfinished``. Raises ``InvalidConfig`` if ``folder`` is in use.
    """
    require_unused(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.unfinished"
    unfinished.mkdir()
    try:
        yield unfinished
        _sync(unfinished)
        unfinished.rename(folder)  # takes the place of an empty folder, and of no other
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
