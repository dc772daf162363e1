"""``python -m ecckpt.cli.forkserver_main``: the server process that forks agents for tests.

``testing/agent_forkserver.py`` starts it and sends requests over its standard input. Requests and
answers are JSON, one per line:

    {"poll": PID}                                       -> exit status, or null while it runs
    {"arguments", "environment", "folder", "log": ...}  -> process id of the new agent

It ends when its standard input is closed. It stays single-threaded, because a fork of a process
with threads may inherit locked locks.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# Everything that an agent imports at its start or later, so that forked agents have it already.
import gunicorn.arbiter
import gunicorn.workers.gthread  # noqa: F401

import ecckpt.agent.runtime.daemon  # noqa: F401
from ecckpt.cli.command import main


def serve() -> int:
    """Answer requests until the input ends; return the exit status of this process.

    After a fork it also returns in the child, with the exit status of the agent.
    """
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            _answer(_status(request["poll"]))
        elif os.fork() == 0:
            return _run_agent(request)
    return 0


def _answer(value: int | None) -> None:
    print(json.dumps(value), flush=True)


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _run_agent(request: dict[str, Any]) -> int:
    """Turn this forked child into an agent and run it; return its exit status."""
    # The child answers, and only after setsid: callers kill the agent by its process group, which
    # must exist when they know the process id.
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
