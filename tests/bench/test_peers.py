"""Cases in processes of their own: what they return, and what is said when they fail."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import usage
from bench.elsewhere import Elsewhere
from ecckpt.errors import AgentUnreachable
from ecckpt.testing.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long  # each process loads torch


@contextlib.contextmanager
def ends_in_many_ways(folder, number):
    (folder / "made").touch()

    def fail():
        print("what it printed")
        raise ValueError(f"no {number}")

    yield {
        "right": lambda: number + 0.5,
        "wrong": fail,
        "gone": lambda: os._exit(1),
    }


def test_cases_run_in_another_process_with_a_folder_of_their_own():
    with Elsewhere(ends_in_many_ways, 7) as other:
        cases = other.cases()
        assert list(cases) == ["right", "wrong", "gone"]
        assert cases["right"]() == 7.5
        assert other.pid in usage.tree(os.getpid())
        folder = other._log.parent
        assert (folder / "made").exists()
    assert not folder.exists()
    assert other.pid not in usage.tree(os.getpid())


@pytest.mark.parametrize(("case", "said"), [("wrong", "no 7"), ("gone", "ended")])
def test_the_end_of_what_a_failed_peer_printed_is_shown(case, said):
    with Elsewhere(ends_in_many_ways, 7) as other:
        cases = other.cases()
        with pytest.raises(RuntimeError, match=said) as caught:
            cases[case]()
    assert case == "gone" or "what it printed" in str(caught.value)


def test_what_processes_use_is_counted():
    before_s = usage.cpu_s([os.getpid()])
    sum(range(1 << 20))
    assert usage.cpu_s([os.getpid()]) > before_s
    assert usage.cpu_s([1 << 22]) == 0  # more than there can be: it counts as ended
    with usage.Peak([os.getpid()]) as peak:
        bytearray(os.urandom(1 << 20) * 64)
    assert peak.most_bytes >= 64 << 20


def test_a_cluster_can_be_paced():
    agents = LocalCluster(nodes=1, pull_mb_s="five")
    with pytest.raises(AgentUnreachable, match="--pull-mb-s: invalid float value: 'five'"):
        agents.start()
    agents.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "of"),
    [
        (["bench.copies", "--quick", "--mib", "4", "--rounds", "1"], "memcpy"),
        (["bench.costs", "--quick", "--rounds", "1"], "costs"),
    ],
)
def test_every_bench_of_peers_ends_with_figures(arguments, of):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])[of]
