"""Phases of saves and restores: recorded, collected, shown."""

import json

import pytest
import torch

import ecckpt
from ecckpt.cli import main
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.trace import Span, Trace
from ecckpt.protocol.tracing import KEPT, Tracer, chrome_trace, moment
from ecckpt.testing.local_cluster import LocalCluster

SHARD = ShardId("run", Generation(1, 7, "0" * 16), 3)


def test_a_span_is_noted_also_if_its_block_raises():
    tracer = Tracer()
    with pytest.raises(KeyError), tracer.span("pull", SHARD, 4):
        raise KeyError
    began = moment()
    tracer.since(began, "choose", SHARD)
    first, second = tracer.spans_of("run")
    assert (first.name, first.shard, first.index) == ("pull", SHARD, 4)
    assert (second.name, second.index) == ("choose", -1)
    assert first.began_unix_s <= second.began_unix_s == began[0]
    assert first.seconds >= 0
    assert tracer.spans_of("another") == ()


def test_spans_are_taken_once_and_bounded():
    tracer = Tracer()
    for _ in range(KEPT + 3):
        tracer.since(moment(), "copy", SHARD)
    assert len(tracer.take()) == KEPT
    assert tracer.take() == ()


def test_a_trace_has_nodes_as_processes_and_ranks_as_threads():
    spans = (
        Span(name="copy", shard=SHARD, index=-1, began_unix_s=100.5, seconds=0.25),
        Span(name="pull", shard=SHARD, index=2, began_unix_s=101.0, seconds=0.5),
    )
    document = chrome_trace([Trace("b", (), spans[1:]), Trace("a", spans[:1], ())])
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (1, 0): "node a",
        (1, 1): "rank 3",
        (2, 0): "node b",
        (2, 1): "agent: pull",
    }
    copied, pulled = (event for event in events if event["ph"] == "X")
    assert (copied["pid"], copied["tid"], copied["ts"], copied["dur"]) == (1, 1, 100.5e6, 0.25e6)
    assert pulled["args"] == {"rank": 3, "generation": f"1.7.{'0' * 16}", "fragment": 2}


def test_saves_and_restores_of_a_run_are_traced(tmp_path, capsys):
    state = {"w": torch.arange(50_000.0)}
    with LocalCluster(nodes=3) as cluster:
        root, agents = cluster.root("n0"), cluster.addresses()
        with ecckpt.Checkpointer("traced", code=(1, 1), root=root, agents=agents) as ckpt:
            assert ckpt.restore(state) is None
            assert ckpt.save(5, state, patience_s=60).wait(60)
        with ecckpt.Checkpointer("traced", code=(1, 1), root=root, agents=agents) as ckpt:
            assert ckpt.restore(state).step == 5
        out = tmp_path / "trace.json"
        assert main(["trace", "traced", *agents, "--out", str(out)]) == 0
        assert main(["trace", "traced", agents[0], "127.0.0.1:1"]) == 1
        assert main(["trace", "traced", "127.0.0.1:1"]) == 2
    events = json.loads(out.read_text())["traceEvents"]
    found = {event["cat"] for event in events if event["ph"] == "X"}
    of_ranks = {"plan", "slot", "copy", "protect and commit"}
    of_ranks |= {"choose", "bring", "prove", "check", "agree", "load"}
    assert found == of_ranks | {"allocate", "encode", "pull", "verify"}
    assert all(event["args"]["rank"] == 0 for event in events if event["ph"] == "X")
    printed = capsys.readouterr()
    assert "no answer" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["traceEvents"]
