"""``Launch``: starts, follows and kills a training under torchrun; ``show.py`` uses it."""

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

_POLL_S = 0.05  # workers report by appending to files, which are polled
_LOG_LINES = 15  # of the log in an error message


class TrainingFailed(EcckptError):
    """The training ended with an error, or did not end in time."""


class Launch:
    """One training: torchrun with one worker per rank.

    torchrun makes each worker the leader of its own session. Workers append events to
    ``FOLDER/NAME.events.RANK`` and write results to ``FOLDER/NAME.result.RANK``.
    """

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
        # One thread per worker, as the ranks share the machine's cores. Without the second setting,
        # torch would reuse the rendezvous store of a training that was killed.
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
        """Call ``seen`` for each event, in order per rank, until ``until()`` is true or the end.

        Raises ``TrainingFailed`` with the end of the log if the training fails or takes longer than
        ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while not until():
            # Poll first: events that precede the end are then read before it is reported.
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
        """SIGKILL torchrun and all workers, and wait until they have ended."""
        # Stop torchrun first, so that it starts no worker after its children were listed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)
        workers = children(self._process.pid)
        for pid in (self._process.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._process.wait()
        await_end(workers)

    def results(self) -> list[Any]:
        """Return the result of each rank: losses and digests of the final state."""
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
            complete = data[: data.rfind(b"\n") + 1]  # a line may be only partly written
            self._read[rank] += len(complete)
            events += [json.loads(line) for line in complete.splitlines()]
        return events

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])
