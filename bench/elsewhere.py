"""Cases in separate processes, so that one peer's imports, patches and logs disturb no other."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bench.measuring import Timed

# A function of a module; gets a new folder in tmpfs and the other arguments of `Elsewhere`.
Maker = Callable[..., AbstractContextManager[dict[str, Timed]]]

# Of torch, in each process: more threads get in each other's way where ranks share the CPUs, and
# single peers gain a tenth or lose a lot (README.md).
THREADS = 1

START_TIMEOUT_S = 120.0
LOG_TAIL_BYTES = 2000


class Elsewhere:
    """One process that makes cases and runs them on request; use as a context manager.

    Its output goes to a file; an error shows the end of that file.
    """

    def __init__(self, make: Maker, *arguments: object) -> None:
        self._make, self._arguments = make, arguments
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-")
        self._log = Path(self._stack.enter_context(folder)) / "log"
        self._pipe, theirs = multiprocessing.Pipe()
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.elsewhere", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self.pid = process.pid
        self._stack.callback(_end, process)
        self._stack.callback(self._pipe.close)
        self._pipe.send((sys.path, _module_of(self._make), self._make.__name__))
        self._pipe.send((self._log.parent, *self._arguments))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """Wait until it has made its cases; return their names. Call this first, and once."""
        return list(self._answer())

    def start(self, name: str) -> None:
        """Start one of its cases."""
        self._pipe.send(name)

    def running(self) -> bool:
        """Return whether the case is still running."""
        return not self._pipe.poll()

    def seconds(self) -> float:
        """Wait for the running case; return its result."""
        return float(self._answer())

    def timed(self, name: str) -> Timed:
        """Return one of its cases as a function that runs here."""

        def run() -> float:
            self.start(name)
            return self.seconds()

        return run

    def cases(self) -> dict[str, Timed]:
        """Return all of its cases; call this instead of ``names``."""
        return {name: self.timed(name) for name in self.names()}

    def _answer(self) -> object:
        try:
            if not self._pipe.poll(START_TIMEOUT_S):
                raise RuntimeError(f"no answer within {START_TIMEOUT_S:g} s: {self._printed()}")
            problem, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"a process of a peer ended: {self._printed()}") from None
        if problem:
            raise RuntimeError(f"a peer failed: {problem}: {self._printed()}")
        return value

    def _printed(self) -> str:
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


def _module_of(make: Maker) -> str:
    """Return the module's name for an import; a bench that runs as a program has another name."""
    if make.__module__ != "__main__":
        return make.__module__
    return str(sys.modules["__main__"].__spec__.name)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(THREADS)
    try:
        sys.path[:], module, name = pipe.recv()
        make = getattr(importlib.import_module(module), name)
        with make(*pipe.recv()) as cases:
            pipe.send(("", list(cases)))
            while True:
                pipe.send(("", cases[pipe.recv()]()))
    except EOFError:
        return
    except Exception as error:  # the parent raises it
        traceback.print_exc()
        sys.stdout.flush()
        pipe.send((repr(error), None))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
