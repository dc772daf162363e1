"""Cases in a process of their own, where what one peer loads, patches or logs disturbs no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bench.measuring import Timed

# Told a new folder in tmpfs and what else `Elsewhere` was given; a function of some module.
Maker = Callable[..., AbstractContextManager[dict[str, Timed]]]

START_TIMEOUT_S = 120.0
LOG_TAIL_BYTES = 2000


class Elsewhere:
    """One process that makes cases and runs them when told; use as a context manager.

    What it prints goes to a file, whose end an error shows.
    """

    def __init__(self, make: Maker, *arguments: object) -> None:
        self._make, self._arguments = make, arguments
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-")
        self._log = Path(self._stack.enter_context(folder)) / "log"
        self._pipe, theirs = context.Pipe()
        # Not a daemon: those may have no children, and some peers write in a child.
        process = context.Process(target=_serve, args=(theirs, self._log, self._make))
        process.start()
        theirs.close()
        assert process.pid is not None
        self.pid = process.pid
        self._stack.callback(_end, process)
        self._stack.callback(self._pipe.close)
        self._pipe.send(self._arguments)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """The names of its cases, once it has made them; asked for first, and once."""
        return list(self._answer())

    def start(self, name: str) -> None:
        """Have it run a case."""
        self._pipe.send(name)

    def running(self) -> bool:
        """Whether it has not come to the end of that yet."""
        return not self._pipe.poll()

    def seconds(self) -> float:
        """Wait for the case that it runs: what that returned."""
        return float(self._answer())

    def timed(self, name: str) -> Timed:
        """One of its cases, as if it ran here."""

        def run() -> float:
            self.start(name)
            return self.seconds()

        return run

    def cases(self) -> dict[str, Timed]:
        """All of its cases; asked for instead of the names."""
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


def _serve(pipe: Connection, log: Path, make: Maker) -> None:
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    try:
        with make(log.parent, *pipe.recv()) as cases:
            pipe.send(("", list(cases)))
            while True:
                pipe.send(("", cases[pipe.recv()]()))
    except EOFError:
        return
    except Exception as error:  # the parent raises it
        pipe.send((repr(error), None))
        raise


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(30)
    if process.is_alive():
        process.kill()
        process.join()
