"""Files in tmpfs to be mapped, and small file systems to be filled: removed, always unmounted."""

import errno
import itertools
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ecckpt.memory.mapping import HUGE_PAGE_BYTES

SIZE = 3 * HUGE_PAGE_BYTES + 5 * mmap.PAGESIZE


@contextmanager
def tmpfs_file(size=SIZE, *, reserve=True):
    """An open file in tmpfs, all of it there, or nothing."""
    path = Path("/dev/shm") / f"ecckpt-test-mapping-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        if reserve:
            os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def mapped_here():
    return f"ecckpt-test-mapping-{os.getpid()}" in Path("/proc/self/maps").read_text()


def _try(*command: str) -> None:
    """Run it, or skip the test by name."""
    if os.geteuid() != 0:
        pytest.skip(f"{command[0]} needs root")
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=30)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]} here")
    if done.returncode:
        pytest.skip(f"{' '.join(command)} does not work here: {done.stderr.decode().strip()}")


@contextmanager
def small_tmpfs(folder: Path, size: str = "16m") -> Iterator[Path]:
    """A tmpfs of its own."""
    _try("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "ecckpt-test", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, what: str) -> None:
    """Fill a small tmpfs until it has no room for another page ("bytes") or file ("files")."""
    try:
        for number in itertools.count() if what == "files" else ():
            (folder / f"filler-{number}").touch()
        with (folder / "filler").open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017


@contextmanager
def small_ext4(folder: Path, mib: int = 16) -> Iterator[Path]:
    """A real file system on a real (loop) device: fsync, ENOSPC and fsfreeze as on any disk."""
    image, mounted = folder / "image", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    # No journal and no blocks kept back: the size that is asked for is the size there is.
    _try("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image))
    _try("mount", "-o", "loop", str(image), str(mounted))
    try:
        mounted.chmod(0o700)
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@contextmanager
def frozen(mounted: Path) -> Iterator[None]:
    """Whoever writes to the file system waits until the end of the block."""
    _try("fsfreeze", "--freeze", str(mounted))
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(mounted)], check=True)
