"""How the library starts the agent of its node, whatever the training program is like."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecckpt.cli.command import main
from ecckpt.client.cluster.local_agent import find_or_start, local_client
from ecckpt.client.config import NodeConfig
from ecckpt.errors import AgentUnreachable
from ecckpt.memory.private_folder import private_folder


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = private_folder(Path(f"/dev/shm/ecckpt-local-{os.getpid()}-{time.monotonic_ns()}"))
    yield folder
    main(["agent", "--root", str(folder), "--stop"])
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def config(root: Path, **fields: object) -> NodeConfig:
    made = {"node": "n0", "domain": "n0", "listen": "127.0.0.1:0", "token_file": None} | fields
    return NodeConfig(root=root, **made)  # type: ignore[arg-type]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from ecckpt.client.cluster.local_agent import find_or_start
from ecckpt.client.config import NodeConfig
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
root = Path(sys.argv[1])
node = NodeConfig(root=root, node="n0", domain="n0", listen="127.0.0.1:0", token_file=None)
print(find_or_start(node).pid)
"""


def test_an_agent_takes_over_nothing_of_the_program_that_starts_it(
    root: Path, tmp_path: Path
) -> None:
    for name in ("secrets", "types", "msgpack", "ecckpt"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    program = tmp_path.parent / "program.py"
    program.write_text(PROGRAM)
    foreign = {"GUNICORN_CMD_ARGS": "--workers=9 --bind=127.0.0.1:1", "WEB_CONCURRENCY": "9"}
    started = subprocess.run(
        [sys.executable, "-P", str(program), str(root)],
        cwd=tmp_path,
        env=os.environ | foreign,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    pid = int(started.stdout)
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    assert not blocked & (1 << (signal.SIGTERM - 1))
    # A worker that dies is replaced, which takes SIGCHLD.
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while True:
        try:
            assert local_client(root).node().pid != pid
            break
        except AgentUnreachable:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert main(["agent", "--root", str(root), "--stop"]) == 0
    with pytest.raises(AgentUnreachable):
        local_client(root).node()


def test_a_start_that_fails_tells_why_at_once(root: Path) -> None:
    with pytest.raises(AgentUnreachable, match=r"ended.*refusing to listen on 192\.0\.2\.1"):
        find_or_start(config(root, listen="192.0.2.1:7421"))


def test_folders_mean_the_same_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECCKPT_ROOT", "agent")
    monkeypatch.setenv("ECCKPT_DISK", "disk")
    node = NodeConfig.from_environment()
    assert (node.root, node.disk) == (tmp_path / "agent", tmp_path / "disk")
