"""``ecckpt import`` of DCP's folders: what torch wrote is read, and nothing in it is run."""

import contextlib
import io
import json
import os
import pickle
import random as python_random
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ecckpt import errors
from ecckpt.integrations.dcp import torch_archive
from ecckpt.integrations.dcp.export import export_dcp
from ecckpt.integrations.dcp.importer import import_dcp, read_folder
from ecckpt.integrations.dcp.pickle_opcodes import Name, PickledCall, read_opcodes
from ecckpt.integrations.dcp.torch_archive import read_archive
from ecckpt.integrations.safetensors.export import export_safetensors
from ecckpt.integrations.torch_dcp import Reader
from ecckpt.state.tensors.dtypes import STORED
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.commands import run as command
from tests.support.dcp import assert_same_world, checkpointer, world_state
from tests.support.forked import run_ranks
from tests.support.stored import opened
from tests.support.tensors import random, same

# What dcp says of a single process, and torch.save of complex32.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:ComplexHalf support")

VALUES = {
    "plain": (None, True, -3, 1 << 70, 2.5, float("inf"), "text", b"bytes", b"", 1j),
    "sets": ({1, 2}, frozenset([3]), set()),
    "torch": (torch.Size([1, 2]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")),
    "dicts": (
        OrderedDict(b=1, a=2),
        Counter("aab"),
        defaultdict(list, {1: [2]}),
        defaultdict(None, {"a": 1}),
        {(1, "a"): {"b": [1, (2,)]}},
    ),
    "more": (deque([1, 2], 3), deque([1]), bytearray(b"q"), [], [1, [2, [3]]]),
    "shared": [[7]] * 3,
    "random": python_random.Random(1).getstate(),
}


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=4) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dcp"


def write(folder, state, **options):
    dcp.save(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)


def archive(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return memoryview(buffer.getvalue())


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


# -- reading --------------------------------------------------------------------------------------


def test_values_of_all_kinds_are_read_exactly(folder, monkeypatch):
    write(folder, {"model": {"w": random(3)}, **VALUES, "flat.key": 1})

    def refuse(*args, **options):
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    state, notes = read_folder(folder)
    assert {name: state[name] for name in VALUES} == VALUES
    assert {n: type(v) for n, v in state.items()} == {
        **{name: type(value) for name, value in VALUES.items()},
        "model.w": torch.Tensor,
        "flat.key": int,
    }
    assert [type(each) for each in state["dicts"]] == [type(each) for each in VALUES["dicts"]]
    assert state["more"][0].maxlen == 3
    assert set(notes.values) == {*VALUES, "flat.key"}
    assert notes.paths["model.w"] == ("model", "w")
    assert notes.paths["flat.key"] == ("flat.key",)


@pytest.mark.parametrize("files", [True, False])
def test_tensors_of_all_kinds_are_read_exactly(folder, files):
    raw = torch.arange(64, dtype=torch.uint8) % 2
    tensors = {str(dtype)[6:]: raw.view(dtype).reshape(2, -1) for dtype in STORED}
    base = random(6, 8)
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": base.T,
        "slice": base[1:4, ::2],
        "expanded": random(1, 3).expand(4, 3),
        "conj": torch.tensor([1 - 2j]).conj(),
        "neg": torch.tensor([1 - 2j, 3j]).conj().imag,
        "parameter": torch.nn.Parameter(random(3)),
    }
    write(folder, tensors, single_file_per_rank=files)
    state, notes = read_folder(folder)
    assert notes.values == ()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = state[name].resolve_conj().resolve_neg()
        assert same(found, tensor.detach().resolve_conj().resolve_neg()), name


def test_a_run_on_other_ranks_and_back(cluster, tmp_path):
    folder = tmp_path / "dcp"

    def save(rank):
        dcp.save(world_state(2, seed=4), checkpoint_id=folder)

    run_ranks(tmp_path, 2, save)
    done = import_dcp(
        "imported", folder, root=cluster.root(cluster.nodes[0]), agents=cluster.addresses(), step=7
    )
    assert done.tensors == 5
    assert done.total_bytes == 4 * (91 + 36 + 5 + 6 + 3)

    def load(rank):
        with checkpointer(cluster, "imported", rank) as one:
            reader = Reader(one)
            blank = world_state(3, blank=True)
            dcp.load(blank, storage_reader=reader)
            assert_same_world(blank, world_state(3, seed=4))
            return reader.step, reader.saved_by

    assert run_ranks(tmp_path, 3, load) == [(7, 1)] * 3
    found = opened(cluster, "imported")
    export_safetensors(found, tmp_path / "st")
    export_dcp(found, tmp_path / "again")
    state, notes = read_folder(tmp_path / "again")
    whole, own = read_folder(folder)
    assert (set(notes.values), notes.paths) == (set(own.values), own.paths)
    assert all(same(state[name], whole[name]) for name in state.keys() - set(notes.values))
    assert all(state[name] == whole[name] for name in notes.values)


def test_by_command(capsys, cluster, folder):
    write(folder, {"model": {"x": random(3)}, "step": 1})
    root = cluster.root(cluster.nodes[0])
    words = ("import", "by-command", folder, "--root", root, "--json")
    status, out, err = command(capsys, *words)
    assert (status, err) == (0, "")
    assert json.loads(out)["tensors"] == 1
    status, _, err = command(capsys, *words)
    assert status == 2
    assert "knows run 'by-command' already" in err
    status, _, err = command(capsys, "import", "tied", folder, "--root", root, "--tie", "a=b")
    assert status == 2
    assert "--tie is not for DCP's folders" in err


# -- refusing -------------------------------------------------------------------------------------


def test_nothing_of_a_pickle_is_run(folder, tmp_path):
    made = tmp_path / "made"
    write(folder, {"x": random(3), "bomb": Bomb(made)})
    with pytest.raises(errors.UnsupportedState, match=r"bomb: cannot store a pickled posix\.mkdir"):
        read_folder(folder)
    metadata = folder / ".metadata"
    metadata.write_bytes(pickle.dumps(Bomb(made)))
    with pytest.raises(errors.InvalidFolder, match="'mkdir' where Metadata should be"):
        read_folder(folder)
    assert not made.exists()
    assert read_opcodes(pickle.dumps(Bomb(made))).call == Name("posix", "mkdir")


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Own(), ".*test_importer.Own"),
        (np.float64(1), ".*numpy"),
        (np.arange(2), ".*numpy"),
        (Path("a"), ".*pathlib"),
        (len, "__builtin__.len"),
        (torch.ones(2).to_sparse(), ".*_rebuild_sparse_tensor"),
        (defaultdict(Own), "collections.defaultdict"),
        (1.5 + np.complex128(1), ".*numpy"),
    ],
)
def test_what_only_unpickling_could_make_is_refused_by_its_path(value, text):
    data = archive({"deep": [value]})
    with pytest.raises(errors.UnsupportedState, match=rf"^here\.deep\.0: .* pickled {text}"):
        read_archive(data, ("here",))


def test_shared_and_endless_lists_are_bounded(monkeypatch):
    monkeypatch.setattr(torch_archive, "_NODES_LEAST", 10_000)
    shared = [1]
    for _ in range(40):
        shared = [shared, shared]
    endless = []
    endless.append(endless)
    for value in (shared, endless):
        with pytest.raises(errors.UnsupportedState, match="values this many or this deep"):
            read_archive(archive(value), ("here",))


def test_archives_that_are_none():
    data = bytes(archive({"x": random(3)}))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", b"\x80\x02N.")
    big = io.BytesIO()
    with zipfile.ZipFile(big, "w") as out:
        out.writestr("archive/data.pkl", b"\x80\x02N.")
        out.writestr("archive/byteorder", b"big")
    for broken in (
        b"",
        data[:-30],
        data[30:],
        data.replace(b"FloatStorage", b"FlootStorage"),
        data.replace(b"K\x03\x85", b"K\x09\x85"),  # a shape beyond the storage
        bytes(archive(torch.device("cuda", 1))).replace(b"cuda", b"cu;a"),
        packed.getvalue(),
        big.getvalue(),
    ):
        with pytest.raises((errors.InvalidFolder, errors.UnsupportedState)):
            read_archive(memoryview(broken), ("here",))


def change(folder, act):
    """Rewrite the metadata as a user with bad intentions could."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    act(metadata)
    path.write_bytes(pickle.dumps(metadata))


def in_storage(**fields):
    def act(metadata):
        for info in metadata.storage_data.values():
            for name, value in fields.items():
                object.__setattr__(info, name, value)

    return act


def chunk_at(offset):
    def act(metadata):
        metadata.state_dict_metadata["x"].chunks[0].offsets = torch.Size([offset])

    return act


def no_chunks(metadata):
    metadata.state_dict_metadata["x"].chunks.clear()


def no_storage(metadata):
    metadata.storage_data.clear()


def far_index(metadata):
    metadata.planner_data["x"] = (1 << 40,)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (in_storage(relative_path="../x"), "which is not a file of this folder"),
        (in_storage(relative_path="/etc/passwd"), "which is not a file of this folder"),
        (in_storage(relative_path="none"), "cannot be read"),
        (in_storage(offset=1 << 40), "is cut off"),
        (in_storage(offset=3), "not an archive of torch.save"),
        (in_storage(length=-1), "not a tuple of sizes"),
        (in_storage(transform_descriptors=["zstd"]), "transformed"),
        (chunk_at(1), "a box beyond its tensor"),
        (chunk_at(1 << 70), "not a tuple of sizes"),
        (no_chunks, "0 of 3 elements"),
        (no_storage, "the metadata has no place for it"),
        (far_index, "path"),
    ],
)
def test_metadata_that_lies(folder, act, text):
    write(folder, {"x": random(3), "value": 1})
    change(folder, act)
    with pytest.raises(errors.InvalidFolder, match=text):
        read_folder(folder)


def test_folders_that_are_none(folder):
    with pytest.raises(errors.InvalidFolder, match="cannot be read"):
        read_folder(folder)
    write(folder, {"x": random(3), "y": random(4)})
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(errors.InvalidFolder, match=r"is cut off: [xy] lies beyond"):
        read_folder(folder)
    data.write_bytes(b"")
    with pytest.raises(errors.InvalidFolder, match="cannot be read"):
        read_folder(folder)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(errors.InvalidFolder, match="cannot be read"):
        read_folder(folder)


PICKLES = [
    pickle.dumps(value, protocol)
    for value in ([1, (2.5, "a", b"b"), {"c": {4}}, frozenset([1])], OrderedDict(a=Own()))
    for protocol in range(2, 6)
]


@given(st.sampled_from(PICKLES), st.integers(0, 200), st.binary(max_size=6))
def test_any_bytes_are_followed_or_refused(data, at, other):
    broken = data[:at] + other + data[at + len(other) :]
    with contextlib.suppress(ValueError):
        read_opcodes(broken)


@pytest.mark.parametrize("data", PICKLES)
def test_opcodes_of_all_protocols(data):
    found = read_opcodes(data)
    if isinstance(found, PickledCall):
        assert found.call == Name("collections", "OrderedDict")
        ((key, own),) = found.pairs
        assert (key, own.call.name in ("Own", "_reconstructor", "__newobj__")) == ("a", True)
    else:
        assert found[:2] == [1, (2.5, "a", b"b")] or isinstance(found[1][2], PickledCall)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"(.",
        b"]",
        b"(NN",
        b"c\n.",
        b"]N\x93.",  # a name of None
        b"NNb.",  # a state for None
        b"Nh\x05.",  # never remembered
        b"N(K\x01K\x02u.",  # pairs for None
        b"N(K\x01e.",  # items for None
        b"}(K\x01u.",  # a key without a value
        b"(i__main__\nx\n.",  # INST calls
        b"\x82\x01.",  # EXT1 looks in a registry
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # more bytes than there are
    ],
)
def test_opcodes_that_make_no_sense(data):
    with pytest.raises(ValueError, match="pickle"):
        read_opcodes(data)
