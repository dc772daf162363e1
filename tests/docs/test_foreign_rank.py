"""A rank that was written from docs/PROTOCOL.md alone takes part in a run beside ours."""

import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ecckpt
from ecckpt.errors import InvalidConfig, SaveFailed
from ecckpt.testing.local_cluster import LocalCluster
from tests.docs import foreign

RUN = "mixed"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
(EXAMPLE,) = [line for line in DOCUMENT.splitlines() if line.startswith("ClusterConfig(")]
FINGERPRINT = (
    EXAMPLE.replace("run='r'", f"run='{RUN}'")
    .replace("save_timeout_s=120.0", f"save_timeout_s={foreign.TIMEOUT_S}")
    .replace("restore_timeout_s=300.0", f"restore_timeout_s={foreign.TIMEOUT_S}")
)


class Start:
    """A start of the run: our rank 0 at n0, the foreign rank 1 at n1; n2 has no ranks."""

    def __init__(self, cluster, fingerprint=FINGERPRINT, replicated=()):
        self._cluster, self._fingerprint = cluster, fingerprint
        self._replicated = replicated
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self):
        store, root = dist.HashStore(), self._cluster.root
        (other,) = self._cluster.addresses()[2:]

        def ours():
            return ecckpt.Checkpointer(
                RUN,
                root=root("n0"),
                agents=[other],
                replicated=self._replicated,
                save_timeout_s=foreign.TIMEOUT_S,
                restore_timeout_s=foreign.TIMEOUT_S,
                store=store,
                rank=0,
                world_size=2,
            )

        def theirs():
            rank = foreign.ForeignRank(
                store,
                run=RUN,
                rank=1,
                ranks=2,
                root=root("n1"),
                fingerprint=self._fingerprint,
            )
            rank.join()
            return rank

        self.ours, self.theirs = self.both(ours, theirs)
        return self

    def __exit__(self, *error):
        if hasattr(self, "ours"):
            self.ours.close()
        self._pool.shutdown()

    def both(self, ours, theirs):
        """Do something on both ranks at once."""
        first, second = self._pool.submit(ours), self._pool.submit(theirs)
        return first.result(), second.result()

    def save(self, step, state, data):
        handle, committed = self.both(
            lambda: self.ours.save(step, state, patience_s=foreign.TIMEOUT_S),
            lambda: self.theirs.save(step, data),
        )
        assert handle.wait(foreign.TIMEOUT_S)
        return committed

    def restore(self, state):
        restored, (data, order) = self.both(lambda: self.ours.restore(state), self.theirs.restore)
        return restored, data, order


def fields_after(words):
    """Return the fields of the table that follows these words in the document."""
    table = re.search(r"(?: *\|.*\n)+", DOCUMENT.split(words)[1])[0]
    return re.findall(r"^ *\| `(\w+)` \|", table, re.M)


def state_of(step):
    return {"model": torch.full((30_000,), float(step)), "step": step}


def data_of(step):
    return bytes([step]) * (70_000 + step)  # more than a block


def test_a_foreign_rank_saves_and_restores_beside_ours():
    assert "ecckpt" not in {line.split()[1] for line in _imports()}
    with LocalCluster(nodes=3) as cluster:
        with Start(cluster) as start:
            restored, data, order = start.restore(state_of(0))
            assert (restored, data, order["timeline"]) == (None, None, 1)
            assert fields_after("The answer to each rank is a map:") == list(start.theirs.roster)
            assert fields_after("is an Order, a msgpack map:") == list(order)
            assert start.theirs.holders == ["n2", "n0"]
            for step in (1, 2):
                assert start.save(step, state_of(step), data_of(step))
            # A save that the foreign rank gives up fails on ours, and costs nothing else.
            handle, _ = start.both(
                lambda: start.ours.save(3, state_of(3), patience_s=foreign.TIMEOUT_S),
                lambda: start.theirs.give_up(3),
            )
            with pytest.raises(SaveFailed, match="another rank could not protect its shard"):
                handle.wait(foreign.TIMEOUT_S)
            assert start.save(4, state_of(4), data_of(4))
        with Start(cluster) as start:
            state = state_of(0)
            restored, data, order = start.restore(state)
            assert (restored.step, restored.timeline, state["step"]) == (4, 2, 4)
            assert (data, order["local"], order["repair"]) == (data_of(4), True, [])
            assert start.theirs.parent == str(restored.generation)
            assert start.save(5, state_of(5), data_of(5))
        cluster.empty("n1")  # the foreign rank's home copy is gone
        with Start(cluster) as start:
            restored, data, order = start.restore(state_of(0))
            assert (restored.step, restored.timeline) == (5, 3)
            assert (data, order["local"]) == (data_of(5), False)
            assert start.save(6, state_of(6), data_of(6))


def test_a_foreign_rank_claims_what_all_ranks_have():
    fingerprint = FINGERPRINT.replace("replicated=()", "replicated=('model',)")

    def claim(value):
        raw = struct.pack("<10f", *[value] * 10)
        return [("model", "torch.float32", (10,), raw)]

    def save(start, step, ours, theirs):
        return start.both(
            lambda: start.ours.save(
                step, {"model": torch.full((10,), ours)}, patience_s=foreign.TIMEOUT_S
            ),
            lambda: start.theirs.save(step, data_of(step), claim(theirs)),
        )

    with LocalCluster(nodes=3) as cluster, Start(cluster, fingerprint, ["model"]) as start:
        start.restore({"model": torch.zeros(10)})
        handle, committed = save(start, 1, 1.0, 1.0)
        assert handle.wait(foreign.TIMEOUT_S)
        assert committed
        handle, committed = save(start, 2, 1.0, 2.0)
        assert not committed
        with pytest.raises(SaveFailed, match=r"not the same on rank .*: model"):
            handle.wait(foreign.TIMEOUT_S)
        handle, committed = save(start, 3, 3.0, 3.0)
        assert handle.wait(foreign.TIMEOUT_S)


def test_a_rank_that_is_configured_differently_is_refused_by_name():
    with LocalCluster(nodes=3) as cluster:
        start = Start(cluster, fingerprint="ClusterConfig()")
        with pytest.raises(InvalidConfig, match="rank 1 is configured differently"), start:
            pass
        start.__exit__()


def _imports():
    code = Path(foreign.__file__).read_text()
    return [line for line in code.splitlines() if line.startswith(("import ", "from "))]
