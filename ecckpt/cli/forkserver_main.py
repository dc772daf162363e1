"""``python -m ecckpt.cli.nursery``: forks agents, for as long as somebody asks (``nursery.py``).

Requests and answers are lines of JSON. A request is to ``poll`` an agent, by process id: its exit
status, or null if it runs; or to start one: its process id.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# What an agent imports, now and later.
import gunicorn.arbiter
import gunicorn.workers.gthread  # noqa: F401

import ecckpt.agent.runtime.daemon  # noqa: F401
from ecckpt.cli.command import main


def serve() -> int:
    """Answer until there are no more requests. Returns in every agent too, with its exit status."""
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            _answer(_status(request["poll"]))
        elif os.fork() == 0:
            return _be(request)
    return 0


def _answer(value: int | None) -> None:
    print(json.dumps(value), flush=True)


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _be(request: dict[str, Any]) -> int:
    """Be the agent. It answers for itself, once it leads the group that it can be killed by."""
    os.setsid()
    _answer(os.getpid())
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    return main(request["arguments"])


if __name__ == "__main__":
    raise SystemExit(serve())
