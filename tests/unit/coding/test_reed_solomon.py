"""Every engine against the oracle, against zfec, and against every wrong argument."""

import array
import hashlib
import json
import mmap
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import zfec
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.coding import gf256
from ecckpt.coding import reed_solomon as codec
from ecckpt.coding.reed_solomon import Codec, engines
from ecckpt.errors import InvalidBuffer, InvalidCode
from ecckpt.memory import buffers as copying
from ecckpt.memory import native
from tests.support.buffers import (
    empty,
    guarded,
    marks_intact,
    noise,
    oracle_table,
    parts,
    runs_meanwhile,
)

ENGINES = engines()
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "codec.json").read_text())

every_engine = pytest.mark.parametrize("engine", ENGINES)

# -- same bytes as the oracle and zfec ------------------------------------------------------------


@every_engine
def test_every_short_length(engine):
    coder = Codec(3, 2, engine=engine)
    for length in range(301):
        data, parity = parts(3, length, seed=length), empty(2, length, offset=length % 64)
        table = coder.encode(data, parity, 128)
        assert [bytes(p) for p in parity] == gf256.encode(3, 2, [bytes(d) for d in data])
        assert np.array_equal(table, oracle_table([*data, *parity], 128))
        assert all(map(marks_intact, parity))


@every_engine
@pytest.mark.parametrize("block_bytes", [1, 63, 64, 127, 128, 129, 200, 4096, 1 << 30])
def test_lengths_around_block_borders(engine, block_bytes):
    coder = Codec(2, 9, engine=engine)
    for blocks in (1, 2):
        for length in {blocks * min(block_bytes, 700) + shift for shift in (-1, 0, 1)}:
            data, parity = parts(2, length), empty(9, length)
            table = coder.encode(data, parity, block_bytes)
            assert table.shape == (11, -(-length // block_bytes))
            assert np.array_equal(table, oracle_table([*data, *parity], block_bytes))
            assert [bytes(p) for p in parity] == gf256.encode(2, 9, [bytes(d) for d in data])


@cache
def large_case(k, m, length):
    """Return data, parity and checksums of an input that is coded past the caches."""
    data = parts(k, length)
    parity = gf256.encode(k, m, [bytes(d) for d in data])
    return data, parity, oracle_table([*data, *parity], 1 << 18)


@every_engine
@pytest.mark.parametrize("offset", [0, 1, 32])
@pytest.mark.parametrize(("k", "m"), [(3, 2), (2, 11)])
def test_large_fragments(engine, k, m, offset):
    length = (1 << 19) + 77 if m == 2 else (1 << 18) - 5
    data, expected, checksums = large_case(k, m, length)
    parity = empty(m, length, offset)
    table = Codec(k, m, engine=engine).encode(data, parity, 1 << 18)
    assert [bytes(p) for p in parity] == expected
    assert np.array_equal(table, checksums)
    assert all(map(marks_intact, parity))


@st.composite
def cases(draw):
    k = draw(st.integers(1, 12) | st.sampled_from([17, 40, 128]))
    m = draw(st.integers(0, 12) | st.sampled_from([17, 40]))
    length = draw(st.integers(0, 300 if k + m > 30 else 3000))
    block_bytes = draw(st.integers(1, 200) | st.integers(201, 5000))
    return k, m, length, block_bytes, draw(st.integers(0, 64)), draw(st.randoms())


@every_engine
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_any_code_against_oracle_and_zfec(engine, case):
    k, m, length, block_bytes, offset, random = case
    coder = Codec(k, m, engine=engine)
    data = empty(k, length, offset)
    for view in data:
        view[:] = np.frombuffer(random.randbytes(length), np.uint8)
    parity = empty(m, length, random.randrange(65))
    table = coder.encode(data, parity, block_bytes)
    fragments = [bytes(view) for view in (*data, *parity)]
    assert np.array_equal(table, oracle_table(fragments, block_bytes))
    assert fragments[k:] == zfec.Encoder(k, k + m).encode(fragments[:k], list(range(k, k + m)))

    survivors = random.sample(range(k + m), k)
    lost = [index for index in range(k + m) if index not in survivors]
    decoded = zfec.Decoder(k, k + m).decode([fragments[i] for i in survivors], survivors)
    assert [bytes(block) for block in decoded] == fragments[:k]

    missing = dict(zip(lost, empty(m, length, offset), strict=True))
    rebuilt = coder.rebuild({i: fragments[i] for i in survivors}, missing, block_bytes)
    assert {i: bytes(view) for i, view in missing.items()} == {i: fragments[i] for i in lost}
    assert np.array_equal(rebuilt, table)
    assert all(map(marks_intact, (*data, *parity, *missing.values())))


@every_engine
@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 2), (3, 3), (4, 2)])
def test_every_set_of_survivors(engine, k, m):
    coder = Codec(k, m, engine=engine)
    data, parity = parts(k, 150), empty(m, 150)
    table = coder.encode(data, parity, 100)
    fragments = dict(enumerate([*data, *parity]))
    for count in range(k, k + m + 1):
        for survivors in combinations(range(k + m), count):
            missing = {i: empty(1, 150)[0] for i in fragments if i not in survivors}
            # The order of the mapping must not matter.
            present = {i: fragments[i] for i in reversed(survivors)}
            assert np.array_equal(coder.rebuild(present, missing, 100), table)
            assert all(bytes(missing[i]) == bytes(fragments[i]) for i in missing)


@every_engine
def test_rebuild_of_some_fragments_only(engine):
    coder = Codec(3, 3, engine=engine)
    data, parity = parts(3, 500), empty(3, 500)
    table = coder.encode(data, parity, 200)
    missing = {5: empty(1, 500)[0]}
    rebuilt = coder.rebuild({0: data[0], 2: data[2], 4: parity[1]}, missing, 200)
    assert bytes(missing[5]) == bytes(parity[2])
    assert np.array_equal(rebuilt[[0, 2, 4, 5]], table[[0, 2, 4, 5]])
    assert not rebuilt[[1, 3]].any()


@every_engine
def test_checksums_of_fewer_than_k(engine):
    data = parts(3, 500)
    table = Codec(3, 1, engine=engine).rebuild({1: data[1]}, {}, 200)
    assert np.array_equal(table[1], oracle_table([data[1]], 200)[0])
    assert not table[[0, 2, 3]].any()
    assert Codec(3, 1, engine=engine).rebuild({}, {}, 200).shape == (4, 0)


@every_engine
def test_no_parity(engine):
    data = parts(2, 300)
    table = Codec(2, 0, engine=engine).encode(data, [], 64)
    assert np.array_equal(table, oracle_table(data, 64))


@every_engine
def test_verify_names_every_bad_block(engine):
    coder = Codec(3, 2, engine=engine)
    data, parity = parts(3, 1000), empty(2, 1000)
    table = coder.encode(data, parity, 300)
    damaged = {4: parity[1].copy(), 1: data[1].copy(), 0: data[0]}
    assert coder.verify(damaged, table, 300) == []
    damaged[4][999] ^= 1
    damaged[1][0] ^= 0x80
    damaged[1][599] ^= 0xFF
    assert coder.verify(damaged, table, 300) == [(1, 0), (1, 1), (4, 3)]
    assert coder.verify({}, np.zeros((5, 0), np.uint32), 300) == []


@every_engine
def test_every_kind_of_buffer(engine):
    content = noise(4096).tobytes()
    mapped = mmap.mmap(-1, 4096)
    mapped[:] = content
    data = [content, bytearray(content), memoryview(content), mapped, array.array("d", content)]
    data += [np.frombuffer(content, np.float32).reshape(32, 32)]
    parity = [bytearray(4096), mmap.mmap(-1, 4096), np.empty(1024, np.float32)]
    Codec(6, 3, engine=engine).encode(data, parity, 1024)
    assert [bytes(memoryview(p).cast("B")) for p in parity] == gf256.encode(6, 3, [content] * 6)


@pytest.mark.parametrize("name", GOLDEN)
@every_engine
def test_golden(engine, name):
    golden = GOLDEN[name]
    k, m, length = golden["k"], golden["m"], golden["length"]
    parity = empty(m, length)
    table = Codec(k, m, engine=engine).encode(parts(k, length), parity, golden["block_bytes"])
    assert hashlib.sha256(b"".join(parity)).hexdigest() == golden["parity_sha256"]
    checksums = table.astype("<u4").tobytes()
    assert hashlib.sha256(checksums).hexdigest() == golden["checksums_sha256"]


# -- memory ---------------------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("m", [1, 4, 9])
def test_nothing_outside_the_buffers_is_touched(engine, at_end, m):
    coder = Codec(2, m, engine=engine)
    for length in (1, 7, 63, 64, 65, 127, 129, 4095, 4096, 5000, 1 << 19):
        fragments = guarded(2 + m, length, at_end=at_end)
        for view, content in zip(fragments, parts(2, length), strict=False):
            view[:] = content
        table = coder.encode(fragments[:2], fragments[2:], 4096)
        assert coder.verify(dict(enumerate(fragments)), table, 4096) == []


@every_engine
def test_other_threads_run_meanwhile(engine):
    # Equal data fragments have parity equal to them: a constant polynomial.
    data, (parity,) = [np.ones(1 << 22, np.uint8)] * 64, empty(1, 1 << 22)
    coder = Codec(64, 1, engine=engine)
    assert runs_meanwhile(parity, lambda: coder.encode(data, [parity], 1 << 20))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "m"), [(0, 1), (-1, 2), (1, -1), (200, 57), (257, 0)])
def test_impossible_codes(k, m):
    with pytest.raises(InvalidCode, match=rf"k = {k} .* m = {m} "):
        Codec(k, m)


def test_engine_names():
    assert Codec(2, 1).engine == ENGINES[0]
    assert [Codec(2, 1, engine=name).engine for name in ENGINES] == list(ENGINES)
    assert ENGINES[-1] == "zfec"
    coder = Codec(2, 1, engine="zfec")
    assert (coder.k, coder.m, coder.n) == (2, 1, 3)
    assert repr(coder) == "Codec(2, 1, engine='zfec')"
    for name in ("sse", "", "GFNI"):
        with pytest.raises(InvalidCode, match=f"'{name}' is not usable here .*zfec"):
            Codec(2, 1, engine=name)


@pytest.mark.skipif(not copying.HAVE_NATIVE, reason="no native module")
def test_engine_that_this_cpu_lacks(monkeypatch):
    monkeypatch.setattr(native._native, "engine_names", lambda: ["scalar"])
    assert Codec(2, 1).engine == "scalar"
    with pytest.raises(InvalidCode, match=r"'avx2' is not usable here .*scalar, zfec"):
        Codec(2, 1, engine="avx2")


@pytest.fixture
def indifferent():
    """Afterwards, "auto" is the best engine again."""
    yield
    native.prefer("auto")


@pytest.mark.usefixtures("indifferent")
def test_what_a_process_prefers():
    before = Codec(2, 1)
    for name in ENGINES:
        native.prefer(name)
        assert Codec(2, 1).engine == name
        assert Codec(2, 1, engine="zfec").engine == "zfec"
        target = bytearray(5 << 20)
        copying.copy_bytes(b"x" * len(target), target)
        assert target == b"x" * len(target)
    with pytest.raises(InvalidCode, match="'sse' is not usable here"):
        native.prefer("sse")
    assert Codec(2, 1).engine == ENGINES[-1]
    native.prefer("auto")
    assert Codec(2, 1).engine == before.engine == ENGINES[0]


def strided():
    return np.zeros(200, np.uint8)[::2]


def overlapping():
    memory = np.full(199, 0xAA, np.uint8)
    return memory[:100], memory[99:]


BAD_ENCODES = {
    "1 data and 1 parity buffers": lambda d, p: ([d], [p]),
    "2 data and 2 parity buffers": lambda d, p: ([d, d], [p, bytearray(100)]),
    "fragment 1 has 99 bytes, fragment 0 has 100": lambda d, p: ([d, d[:99]], [p]),
    "fragment 2 has 101 bytes": lambda d, _: ([d, d], [bytearray(101)]),
    "fragment 2 .* is read-only": lambda d, _: ([d, d], [bytes(100)]),
    "fragment 1 is not a contiguous": lambda d, p: ([d, strided()], [p]),
    "fragment 2 is not a contiguous": lambda d, _: ([d, d], [strided()]),
    "fragment 0 is a str": lambda d, p: (["x" * 100, d], [p]),
    "fragment 1 is a NoneType": lambda d, p: ([d, None], [p]),
    "fragment 2 and fragment 1 overlap by 100": lambda d, p: ([d, p], [p]),
}


@every_engine
@pytest.mark.parametrize("message", BAD_ENCODES)
def test_wrong_buffers_are_refused_before_a_byte_is_touched(engine, message):
    target = bytearray(b"\xaa" * 100)
    data, parity = BAD_ENCODES[message](bytes(100), target)
    with pytest.raises(InvalidBuffer, match=message):
        Codec(2, 1, engine=engine).encode(data, parity, 10)
    assert target == b"\xaa" * 100


@every_engine
def test_overlaps(engine):
    coder = Codec(2, 2, engine=engine)
    one, other = overlapping()
    spare = bytearray(100)
    for data, parity in (
        ([one, bytes(100)], [other, spare]),
        ([other, bytes(100)], [spare, one]),
        ([bytes(100)] * 2, [one, other]),
        ([bytes(100)] * 2, [spare, spare]),
    ):
        with pytest.raises(
            InvalidBuffer, match=r"fragment \d and fragment \d overlap by \d+ bytes"
        ):
            coder.encode(data, parity, 10)
    assert (one == 0xAA).all()
    coder.encode([one, other], [spare, bytearray(100)], 10)  # inputs may


def test_a_short_target_inside_a_long_source_is_found():
    memory = np.zeros(1000, np.uint8)
    source, target, inner = memory[:900], memory[100:200], memory[850:950]
    for targets in ([("t", target)], [("t", inner)], [("x", memory[950:]), ("t", target)]):
        with pytest.raises(InvalidBuffer, match=r"t and s overlap by|s and t overlap by"):
            copying.check_disjoint([("s", source), ("z", memory[10:20])], targets)
    copying.check_disjoint([("s", source), ("e", memory[950:950])], [("t", memory[900:])])


@every_engine
@pytest.mark.parametrize("block_bytes", [0, -1, (1 << 30) + 1])
def test_absurd_blocks(engine, block_bytes):
    target = bytearray(b"\xaa" * 9)
    with pytest.raises(InvalidBuffer, match="block_bytes is"):
        Codec(1, 1, engine=engine).encode([bytes(9)], [target], block_bytes)
    assert target == b"\xaa" * 9


@every_engine
@pytest.mark.parametrize(
    ("present", "missing", "message"),
    [
        ([0, 5], [1], r"fragment 5 .* 0\.\.3"),
        ([0, 1], [-1], "fragment -1"),
        ([0, 1, 2], [2, 3], r"fragments \[2\] are given both"),
        ([3], [0, 2], r"1 fragments present, 2 needed to rebuild \[0, 2\]"),
        ([], [1], "0 fragments present"),
    ],
)
def test_wrong_indices(engine, present, missing, message):
    targets = {index: bytearray(b"\xaa" * 8) for index in missing}
    with pytest.raises(InvalidBuffer, match=message):
        Codec(2, 2, engine=engine).rebuild(dict.fromkeys(present, bytes(8)), targets, 4)
    assert all(target == b"\xaa" * 8 for target in targets.values())


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((3, 2), np.uint32),
        np.zeros((4, 3), np.uint32),
        np.zeros(8, np.uint32),
        np.zeros((4, 2), np.int64),
    ],
)
def test_wrong_checksum_tables(table):
    with pytest.raises(InvalidBuffer, match=r"need uint32 of shape \(4, 2\)"):
        Codec(2, 2).verify({0: bytes(8)}, table, 4)


# -- without the native module --------------------------------------------------------------------

WITHOUT_NATIVE = """
import sys
sys.modules["ecckpt.memory._native"] = None
import numpy as np
from ecckpt.coding import gf256, reed_solomon
from ecckpt.errors import InvalidCode
from ecckpt.memory import buffers, native

assert native.engines() == ("zfec",)
for length in (0, 1, 1023, 1024, 70_001):
    data = [bytes((7 * i + j * j) % 251 for j in range(length)) for i in range(3)]
    parity = [bytearray(length) for _ in range(2)]
    coder = reed_solomon.Codec(3, 2)
    assert coder.engine == "zfec"
    table = coder.encode(data, parity, 30_000)
    assert [bytes(p) for p in parity] == gf256.encode(3, 2, data)
    for index, fragment in enumerate([*data, *parity]):
        blocks = [fragment[at : at + 30_000] for at in range(0, length, 30_000)]
        assert table[index].tolist() == [gf256.crc32c(block) for block in blocks]
    missing = {0: bytearray(length), 4: bytearray(length)}
    present = {3: parity[0], 1: data[1], 2: data[2]}
    assert np.array_equal(coder.rebuild(present, missing, 30_000), table)
    assert missing == {0: data[0], 4: parity[1]}
    buffers.copy_bytes(data[0], parity[0])
    assert parity[0] == data[0]
try:
    reed_solomon.Codec(3, 2, engine="scalar")
except InvalidCode as error:
    assert "auto, zfec" in str(error)
else:
    raise SystemExit("scalar was not refused")
"""


def test_zfec_engine_without_the_native_module():
    command = [sys.executable, "-c", WITHOUT_NATIVE]
    root = Path(codec.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
