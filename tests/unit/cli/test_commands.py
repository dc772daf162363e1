"""The command: exit statuses, and errors as one line with a name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecckpt import cli
from ecckpt.format.fragment_file import BLOCK_BYTES, HOME, Header, fragment_bytes_for
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Protect, Reserve, Stage, Watch
from ecckpt.protocol.verbs import PROTECT, RESERVE, STAGE, WATCH
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import generation, writer_of


def run(capsys, *arguments):
    """Exit status, output and errors of ``ecckpt`` with these arguments."""
    try:
        status = cli.main([str(each) for each in arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("ROOT", "NODE", "DOMAIN", "LISTEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"ECCKPT_{name}", raising=False)


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [(), ("agent",), ("status",), ("plan-restore",), ("demo",)], ids=str
)
def test_help(capsys, arguments):
    status, out, err = run(capsys, *arguments, "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: ecckpt")


@pytest.mark.parametrize(
    "arguments",
    [(), ("nonsense",), ("status", "--no-such"), ("plan-restore",), ("plan-restore", "run")],
    ids=str,
)
def test_bad_arguments(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("usage: ecckpt")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "ecckpt", "status", "--root", "/nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("ecckpt: AgentUnreachable: agent unix:/nowhere/agent.sock")
    assert "Traceback" not in ended.stderr


def test_a_bad_environment_is_a_named_error(capsys, monkeypatch):
    monkeypatch.setenv("ECCKPT_NODE", "rack 1")
    status, _, err = run(capsys, "status")
    assert status == 2
    assert err.startswith("ecckpt: InvalidConfig: node 'rack 1' is not a usable name")


# -- no agent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("agent", "--stop")])
def test_no_agent(capsys, tmp_path, arguments):
    status, out, err = run(capsys, *arguments, "--root", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("ecckpt: AgentUnreachable: agent unix:")
    assert str(tmp_path) in err


@pytest.mark.parametrize(
    ("address", "name"), [("127.0.0.1:1", "AgentUnreachable"), ("nonsense", "InvalidConfig")]
)
def test_no_plan_without_an_agent(capsys, address, name):
    status, out, err = run(capsys, "plan-restore", "test", address)
    assert (status, out) == (2, "")
    assert err.startswith(f"ecckpt: {name}: ")
    assert address in err


# -- agents that must not start -------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "some-host"])
def test_an_open_address_needs_a_token(capsys, tmp_path, host):
    status, _, err = run(capsys, "agent", "--root", tmp_path / "r", "--listen", f"{host}:0")
    assert status == 2
    assert err.startswith("ecckpt: InvalidConfig: refusing to listen on")
    assert "--token-file" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "nonsense"), "'nonsense' is no address"),
        (("--listen", "127.0.0.1:99999"), "is no address"),
        (("--node", "rack 1"), "node 'rack 1' is not a usable name"),
        (("--token-file", "/nowhere/token"), "token file /nowhere/token"),
    ],
)
def test_agents_with_impossible_settings(capsys, tmp_path, options, words):
    status, _, err = run(capsys, "agent", "--root", tmp_path / "r", *options)
    assert status == 2
    assert err.startswith("ecckpt: InvalidConfig: ")
    assert words in err
    assert not (tmp_path / "r").exists()


def test_an_agent_whose_folder_is_too_deep(capsys, tmp_path):
    root = tmp_path / ("x" * 100)
    status, _, err = run(capsys, "agent", "--root", root)
    assert status == 2
    assert "longer than a Unix socket's name may be (shorter --root)" in err
    assert not root.exists()


def test_a_token_file_that_others_can_read(capsys, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    status, _, err = run(capsys, "agent", "--root", tmp_path / "r", "--token-file", token)
    assert status == 2
    assert f"chmod 600 {token}" in err


# -- with an agent --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """One agent with the only shard of run "whole" and one of the two of run "half"."""
    with LocalCluster(nodes=1) as cluster:
        _save(cluster.client("n0"), "whole", generation(1, 5), world_size=1)
        _save(cluster.client("n0"), "half", generation(1, 7), world_size=2)
        yield cluster


def _save(client, run_name, gen, *, world_size):
    """A protected home copy, the way a trainer on its own makes one."""
    shard = ShardId(run_name, gen, 0)
    home = Header(
        *(shard, world_size, HOME, 1, 0, 5000, fragment_bytes_for(5000, 1), BLOCK_BYTES),
        *("n0", None, 0),
    )
    slot = client.call(
        RESERVE, Reserve(header=home, memory_bytes=0, local_ranks=1, holders=0, discard=())
    )
    with Path(slot.path).open("r+b") as file:
        file.seek(slot.payload_offset)
        file.write(os.urandom(5000))
    client.call(STAGE, Stage(home, slot.region))
    client.call(
        PROTECT,
        Protect(
            shard=shard,
            writer=writer_of(1),
            targets=(),
            min_fragments=0,
            every_living=False,
            memory_bytes=0,
            timeout_s=10.0,
            discard=(),
        ),
    )
    state = "encoding"
    while state not in ("protected", "failed"):
        state = client.call(WATCH, Watch(shard, state, 5.0)).state
    assert state == "protected"


def test_status(capsys, cluster):
    status, out, err = run(capsys, "status", "--root", cluster.root("n0"))
    assert (status, err) == (0, "")
    assert out.startswith("node n0 (domain n0) at 127.0.0.1:")
    assert "run whole: committed nothing, 1 home copies, 0 fragments" in out


def test_status_as_json(capsys, cluster):
    status, out, _ = run(capsys, "status", "--json", "--root", cluster.root("n0"))
    found = json.loads(out)
    assert (status, found["node"]) == (0, "n0")
    assert found["runs"]["half"]["generations"] == [str(generation(1, 7))]


def test_a_second_agent_in_one_folder(capsys, cluster):
    status, _, err = run(capsys, "agent", "--root", cluster.root("n0"), "--node", "n0")
    assert status == 1
    assert "an agent already runs here (pid" in err


@pytest.mark.parametrize(
    ("run_name", "status", "state", "words"),
    [
        ("whole", 1, "recoverable", "survives 0 more node losses"),
        ("half", 2, "lost", "rank 1: nothing of it was found"),
    ],
)
def test_plan_restore(capsys, cluster, run_name, status, state, words):
    found, out, err = run(capsys, "plan-restore", run_name, *cluster.addresses())
    assert (found, err) == (status, "")
    assert state in out
    assert words in out
    assert out.startswith("* 1.5" if status == 1 else "  1.7")


@pytest.mark.parametrize(("run_name", "chosen"), [("whole", str(generation(1, 5))), ("half", None)])
def test_plan_restore_as_json(capsys, cluster, run_name, chosen):
    status, out, _ = run(capsys, "plan-restore", run_name, *cluster.addresses(), "--json")
    plan = json.loads(out)
    assert status == (1 if chosen else 2)
    assert plan["chosen"] == chosen
    assert len(plan["generations"]) == 1


def test_plan_restore_as_if_a_node_had_died(capsys, cluster):
    arguments = ("plan-restore", "whole", *cluster.addresses(), "--without", "n0")
    assert run(capsys, *arguments) == (2, "no generation of run 'whole' on 0 nodes\n", "")


def test_plan_restore_of_an_unknown_run(capsys, cluster):
    status, out, _ = run(capsys, "plan-restore", "unknown", *cluster.addresses())
    assert (status, out) == (2, "no generation of run 'unknown' on 1 nodes\n")
