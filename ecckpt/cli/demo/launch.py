"""Starting, following and killing a training under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ecckpt.errors import EcckptError
from ecckpt.testing.local_cluster import await_end, children

Event = dict[str, Any]

_POLL_S = 0.05
_LOG_LINES = 15


class TrainingFailed(EcckptError):
    """The training ended by itself, with an error."""


class Launch:
    """One training: torchrun with one worker per rank, each a session of its own."""

    def __init__(self, folder: Path, name: str, *, ranks: int, arguments: Sequence[str]) -> None:
        folder.mkdir(exist_ok=True)
        self._events = folder / f"{name}.events"
        self._result = folder / f"{name}.result"
        self._log = folder / f"{name}.log"
        self._ranks = ranks
        self._read = [0] * ranks
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "ecckpt.cli.demo.train", *arguments]
        command += ["--events", str(self._events), "--result", str(self._result)]
        # Each worker gets one core's worth of threads; the store is new for every start.
        settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | settings,
            )

    def follow(
        self, seen: Callable[[Event], None], *, until: Callable[[], bool], timeout_s: float
    ) -> None:
        """Hand every event to ``seen``, in order per rank, until ``until()`` or the end.

        Raises ``TrainingFailed`` with the end of the log if the training fails or takes too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while not until():
            ended = self._process.poll()
            for event in self._new_events():
                seen(event)
            if ended == 0:
                return
            if ended is not None or time.monotonic() > deadline_s:
                what = f"exit status {ended}" if ended is not None else f"no end in {timeout_s:g} s"
                raise TrainingFailed(f"training failed, {what}; its log ends with:\n{self._tail()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL torchrun and every worker, and wait until they are gone."""
        # Stopped first, so that no worker is started between looking and killing.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)
        workers = children(self._process.pid)
        for pid in (self._process.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._process.wait()
        await_end(workers)

    def results(self) -> list[Any]:
        """What each rank left at its end: losses and digests, exact."""
        return [
            json.loads(Path(f"{self._result}.{rank}").read_text()) for rank in range(self._ranks)
        ]

    def _new_events(self) -> list[Event]:
        events = []
        for rank in range(self._ranks):
            path = Path(f"{self._events}.{rank}")
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            events += [json.loads(line) for line in whole.splitlines()]
        return events

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])
