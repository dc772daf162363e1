"""What headers say of a whole generation: parts that fit together, and parts that cannot."""

from dataclasses import replace

import pytest
import torch

from ecckpt.errors import CorruptFragment, StateMismatch
from ecckpt.state.file.catalog import build_catalog
from ecckpt.state.file.header import parse_header
from ecckpt.state.file.layout import arrange, render_entries, render_header
from ecckpt.state.file.metadata import ShardNotes
from ecckpt.state.tensors.sharding import Sharding


def header_of(*tensors):
    """The header of a shard of float32 tensors, given by name and shape; as if it were short."""
    entries = arrange([(name, "F32", shape, 4) for name, shape in tensors])
    data_bytes = max(entry.end for entry in entries)
    text = render_header(render_entries(entries, {}), data_bytes=data_bytes, values_bytes=0)
    return replace(parse_header(memoryview(text), len(text) + data_bytes), data_start=64)


def part(shape, offset, rank, *, whole=(4, 6), coordinate=()):
    """One rank's header with one float32 tensor "x", a box of a global one."""
    sharding = Sharding(
        shape=whole,
        stride=(6, 1),
        placements=("S(0)",),
        mesh_shape=(9,),
        coordinate=coordinate or (rank,),
        offset=offset,
    )
    return header_of(("x", shape)), ShardNotes(shardings={"x": sharding})


def problem(*parts):
    return build_catalog(dict(enumerate(parts))).tensors["x"].problem


def test_a_grid_of_uneven_boxes():
    boxes = [
        ((3, 4), (0, 0)),
        ((3, 2), (0, 4)),
        ((1, 4), (3, 0)),
        ((1, 2), (3, 4)),
        ((0, 6), (4, 0)),
    ]
    found = build_catalog({rank: part(*box, rank) for rank, box in enumerate(boxes)}).tensors["x"]
    assert (found.problem, found.shape, found.size_bytes) == ("", (4, 6), 96)
    assert len(found.pieces) == 4  # nothing is to be read from the empty one
    assert not any(piece.copies for piece in found.pieces)


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((2, 6), (0, 0))], "12 of 24 elements"),
        ([((2, 6), (0, 0)), ((2, 6), (1, 0))], "gaps in dimension 0"),
        ([((2, 6), (0, 0)), ((3, 6), (0, 0))], "overlap in dimension 0"),
        ([((2, 6), (0, 0)), ((3, 6), (2, 0))], "ends? at 5 of 4 in dimension 0"),
        ([((4, 3), (0, 0)), ((2, 3), (0, 3)), ((2, 3), (2, 3))], "overlap in dimension 0"),
        ([((2, 3), (0, 0)), ((2, 3), (2, 3)), ((2, 3), (0, 3)), ((3, 3), (2, 0))], "overlap"),
        ([((4, 6), (0, 0)), ((4, 6), (0, 6))], "ends? at 12 of 6 in dimension 1"),
        ([((2, 6), None), ((2, 6), (2, 0))], "not a single box"),
    ],
)
def test_boxes_that_do_not_fill_the_tensor(boxes, words):
    parts = [part(*box, rank) for rank, box in enumerate(boxes)]
    found = build_catalog(dict(enumerate(parts))).tensors["x"]
    with pytest.raises(StateMismatch, match=f"^1 mismatches: x: .*{words}"):
        found.require()


def test_replicas_are_not_compared_but_two_at_one_place_are():
    replicas = [part((4, 6), (0, 0), rank) for rank in range(3)]
    (piece,) = build_catalog(dict(enumerate(replicas))).tensors["x"].pieces
    assert (piece.rank, piece.copies) == (0, ())
    doubtful = [part((4, 6), (0, 0), rank, coordinate=(rank % 2,)) for rank in range(4)]
    (piece,) = build_catalog(dict(enumerate(doubtful))).tensors["x"].pieces
    assert [copy.rank for copy in piece.copies] == [2, 3]


def test_ranks_that_contradict_each_other():
    whole = (header_of(("x", (4, 6))), ShardNotes())
    assert "sharded on some ranks" in problem(part((4, 6), (0, 0), 0), whole)
    other = part((4, 6), (0, 0), 1, whole=(5, 6))
    assert "float32 of shape [5, 6] on rank 1" in problem(part((4, 6), (0, 0), 0), other)


def plain(*names):
    return header_of(*((name, (2,)) for name in names))


def test_tied_is_what_is_tied_on_all_ranks():
    tied, apart = (plain("x"), ShardNotes(aliases={"y": "x"})), (plain("x", "y"), ShardNotes())
    assert build_catalog({0: tied, 1: tied}).aliases == {"y": "x"}
    for shards in ({0: tied, 1: apart}, {0: apart, 1: tied}):
        found = build_catalog(shards)
        assert (set(found.tensors), found.aliases) == ({"x", "y"}, {})
        (piece,) = found.tensors["y"].pieces
        begins = {each.rank: each.begin for each in (piece, *piece.copies)}
        assert begins == {rank: 64 if shards[rank] is tied else 72 for rank in shards}
    assert build_catalog({0: tied, 1: apart}, prefer=0).aliases == {"y": "x"}
    assert build_catalog({0: tied, 1: apart}, prefer=1).aliases == {}
    swapped = (plain("y"), ShardNotes(aliases={"x": "y", "z": "y"}))
    assert build_catalog({0: tied, 1: swapped}).aliases == {"y": "x"}
    assert build_catalog({0: swapped, 1: swapped}).aliases == {"x": "y", "z": "y"}
    other = (plain("x", "z"), ShardNotes(aliases={"y": "z"}))
    found = build_catalog({0: tied, 1: other})
    assert (set(found.tensors), found.aliases) == ({"x", "y", "z"}, {})


def test_headers_that_nobody_wrote():
    with pytest.raises(CorruptFragment, match="other dimensions"):
        build_catalog({0: part((4,), (0, 0), 0)})
    header, notes = part((4, 6), (0, 0), 0)
    for dtypes in ({"x": "no_dtype"}, {"x": "complex128"}):
        with pytest.raises(CorruptFragment, match="the dtype of 'x' is unknown"):
            build_catalog({0: (header, ShardNotes(dtypes=dtypes, shardings=notes.shardings))})
    with pytest.raises(CorruptFragment, match="aliases"):
        build_catalog({0: (header, ShardNotes(aliases={"y": "z"}))})
    assert build_catalog({0: (header, ShardNotes())}).tensors["x"].dtype is torch.float32
