"""Cuts of global tensors against plain numpy arrays and against torch's own arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ecckpt.state.tensors.boxes import byte_runs, cut_of, in_common, whole

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def meshes(draw, ndim):
    """A mesh's shape and placements on it for a tensor with so many dimensions."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    texts = ["R"]
    for dim in range(ndim):
        texts += [f"S({dim})", f"S({dim}, 2)", f"S({dim}, 3)"]
    return mesh, tuple(draw(st.sampled_from(texts)) for _ in mesh)


@st.composite
def saved_and_wanted(draw):
    shape = draw(shapes)
    return shape, draw(meshes(len(shape))), draw(meshes(len(shape)))


def local(array, cut):
    """What a rank has, by plain indexing."""
    for dim, spans in enumerate(cut.spans):
        picked = [at for start, length in spans for at in range(start, start + length)]
        array = np.take(array, np.array(picked, int), axis=dim)
    return array


def cuts(shape, mesh, placements):
    return [cut_of(shape, placements, mesh, at) for at in np.ndindex(*mesh)]


@given(saved_and_wanted())
def test_what_others_saved_makes_up_what_is_wanted(case):
    shape, saved, wanted = case
    array = np.arange(math.prod(shape)).reshape(shape)
    pieces = {cut: local(array, cut) for cut in cuts(shape, *saved)}  # replicas but once
    for cut in cuts(shape, *wanted):
        made = np.full(cut.shape, -1)
        count = 0
        for piece, content in pieces.items():
            for common in in_common(piece, cut):
                source = tuple(map(slice, common.source, np.add(common.source, common.shape)))
                target = tuple(map(slice, common.target, np.add(common.target, common.shape)))
                made[target] = content[source]
                count += math.prod(common.shape)
        assert np.array_equal(made, local(array, cut))
        assert count == made.size  # each element from one piece


def spelled(text):
    match text.removesuffix(")").partition("(")[2].split(", "):
        case [""]:
            return Replicate()
        case [dim]:
            return Shard(int(dim))
        case [dim, split]:
            return _StridedShard(int(dim), split_factor=int(split))


@given(saved_and_wanted())
def test_torch_cuts_alike(case):
    shape, (mesh, placements), _ = case
    for at in np.ndindex(*mesh):
        cut = cut_of(shape, placements, mesh, at)
        placed = [spelled(text) for text in placements]
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(at), placed)
        assert cut.shape == tuple(size)
        if all(size):
            assert tuple(spans[0][0] for spans in cut.spans) == tuple(offset)


def test_a_strided_shard_interleaves():
    rows = [cut_of((8,), ("S(0, 2)", "S(0)"), (2, 2), at).spans[0] for at in np.ndindex(2, 2)]
    assert rows == [((0, 2),), ((4, 2),), ((2, 2),), ((6, 2),)]
    assert cut_of((8,), ("S(0, 2)",), (2,), (1,)).spans == (((2, 2), (6, 2)),)


@given(st.data())
def test_runs_are_the_bytes_of_the_box_and_as_few_as_can_be(data):
    shape = data.draw(shapes)
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True))
    numbers = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    offsets, run_bytes = byte_runs(shape, start, box, 2)
    raw = numbers.tobytes()
    got = b"".join(raw[at : at + run_bytes] for at in offsets.tolist())
    inside = numbers[tuple(map(slice, start, np.add(start, box)))]
    assert got == inside.tobytes()
    flat = inside.ravel()
    if flat.size:
        assert len(offsets) == 1 + np.count_nonzero(np.diff(flat) != 1)


@pytest.mark.parametrize(
    ("placements", "mesh", "at"),
    [
        (("S(2)",), (2,), (0,)),
        (("S(0)",), (2,), (2,)),
        (("S(0)", "R"), (2,), (0,)),
        (("P",), (2,), (0,)),
        (("S(x)",), (2,), (0,)),
    ],
)
def test_nonsense_is_refused(placements, mesh, at):
    with pytest.raises(ValueError, match=r"placements|at|dimensions"):
        cut_of((4, 4), placements, mesh, at)


def test_a_scalar_is_whole_everywhere():
    assert in_common(whole(()), cut_of((), ("R",), (3,), (1,))) == [((), (), ())]
    assert byte_runs((), (), (), 8)[0].tolist() == [0]
    assert whole((3, 0)).shape == (3, 0)
    assert cut_of((5,), ("S(0)",), (4,), (3,)).shape == (0,)
