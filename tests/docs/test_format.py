"""docs/FORMAT.md against the code: golden files, and its own readers run on real bytes.

To write the golden files anew (only together with a new format version):
``python tests/docs/test_format.py``
"""

import dataclasses
import decimal
import enum
import json
import math
import pathlib
import re
import subprocess
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch

import ecckpt
from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.agent.runtime.run_state_file import pack_notes
from ecckpt.agent.storage.disk import _name
from ecckpt.coding.crc32c import crc32c
from ecckpt.coding.reed_solomon import Codec
from ecckpt.format.fragment_file import (
    FORMAT_VERSION,
    HOME,
    SUPERBLOCK_BYTES,
    Header,
    fragment_bytes_for,
    pack_superblock,
    pack_table,
    parse_superblock,
    parse_table,
)
from ecckpt.format.ids import Generation, ShardId
from ecckpt.integrations.dcp import plan_shard as dcp
from ecckpt.protocol.messages.repair import Guard
from ecckpt.state.file.layout import ITEM_BYTES
from ecckpt.state.file.shard import read_shard
from ecckpt.state.paths import tensor_names
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.snapshot.replicas import Replicas
from ecckpt.state.tensors.dtypes import BYTES_DTYPES, CODE_OF
from ecckpt.state.tensors.sharding import Sharding, box_of
from ecckpt.state.tree import registry, values
from ecckpt.state.tree.nodes import StoredObject, replace_tensors
from ecckpt.state.tree.resolving import resolve
from tests.support.builders import writer_of
from tests.support.trees import same

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
DOCUMENT = (ROOT / "docs" / "FORMAT.md").read_text()


def state():
    """Return tensors of three widths, a tied one, and values of many kinds."""
    weight = torch.arange(1000, dtype=torch.float32)
    return {
        "model": {"weight": weight, "tied": weight, "mask": torch.arange(7, dtype=torch.uint8)},
        "half": torch.arange(5, dtype=torch.bfloat16),
        "double": torch.arange(3, dtype=torch.float64).to(torch.complex128),
        "values": [None, True, -5, 1 << 70, 2.5, 1j, "text", b"bytes", (1, (2,)), {3: {"x", "y"}}],
        "numpy": np.arange(3, dtype="<i4"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }


def shard_of(tree, parts=None, replicas=None):
    boxes = {path: part for path, part in (parts or {}).items() if not part.plain}
    plan = plan_shard(tree, boxes=boxes, replicas=replicas)
    room = bytearray(plan.shard_bytes)
    plan.write(memoryview(room))
    return bytes(room)


def files_of(shard, k, m):
    """Return the files of a shard by index, the home copy (-1) among them, as the code has them."""
    size = fragment_bytes_for(len(shard), k)
    header = Header(
        shard=ShardId("golden", Generation(2, 300, "0123456789abcdef"), 1),
        world_size=4,
        index=HOME,
        k=k,
        m=m,
        shard_bytes=len(shard),
        fragment_bytes=size,
        block_bytes=4096,
        home="node-1",
        parent=Generation(1, 200, "fedcba9876543210"),
        created_unix_s=1_795_900_000,
    )
    whole = shard.ljust(k * size, b"\0")
    data = [whole[at * size : (at + 1) * size] for at in range(k)]
    parity = [bytearray(size) for _ in range(m)]
    trailer = pack_table(Codec(k, m).encode(data, parity, header.block_bytes))
    payloads = {HOME: whole, **dict(enumerate([*data, *map(bytes, parity)]))}
    return {
        index: pack_superblock(header.at(index)) + payload + trailer
        for index, payload in payloads.items()
    }


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: tuple = ()


class Colour(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


def register_golden():
    """Register the classes of the golden shard."""
    ecckpt.register(Point, name="golden.Point")
    ecckpt.register(Colour, name="golden.Colour")
    ecckpt.register(Mode, name="golden.Mode")
    ecckpt.register(decimal.Decimal, encode=str, decode=decimal.Decimal, name="golden.Decimal")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Other tests of this process find none of them."""
    tables = (registry._by_kind, registry._by_name)
    before = [dict(table) for table in tables]
    register_golden()
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


class Loader:
    """An object with a state; its class is stored for messages only."""

    __module__ = "golden"

    def state_dict(self):
        return {"position": 7, "order": torch.tensor([2, 0, 1])}

    def load_state_dict(self, state):
        raise NotImplementedError


def golden_state():
    """Return a state with everything that a shard can hold, and its parts of global tensors.

    What a code, a dtype or a kind of sharding is added for belongs in here.
    """
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    parts = {
        "sharded": Sharding(
            shape=(4, 3),
            stride=(3, 1),
            placements=("S(0)",),
            mesh_shape=(2,),
            coordinate=(1,),
            offset=(2, 0),
        ),
        "held": Sharding(
            shape=(4, 3),
            stride=(3, 1),
            placements=("S(0)", "R"),
            mesh_shape=(2, 2),
            coordinate=(1, 0),
            offset=(2, 0),
            held=(0, 0, 1),
        ),
        "strided": Sharding(
            shape=(8,),
            stride=(1,),
            placements=("S(0)", "S(0, 2)"),
            mesh_shape=(2, 2),
            coordinate=(0, 1),
            offset=None,
        ),
        "outside": Sharding(
            shape=(4,),
            stride=(1,),
            placements=("S(0)",),
            mesh_shape=(2,),
            coordinate=None,
            offset=None,
        ),
        "plain": Sharding(
            shape=(3, 2),
            stride=(2, 1),
            placements=("R",),
            mesh_shape=(3,),
            coordinate=(1,),
            offset=(1, 0),
            held=(0, 1, 1),
            plain=True,
        ),
        "box": box_of((6, 4), (2, 0)),
    }
    shapes = {"sharded": (2, 3), "held": (1, 3), "strided": (2,), "outside": (0,), "plain": (3, 2)}
    state = {
        "model": {"weight": weight, "tied": weight, "empty": torch.empty(0, 3), "scalar": one()},
        "dtypes": {str(dtype).removeprefix("torch."): of_dtype(dtype) for dtype in CODE_OF},
        "as bytes": {name: of_dtype(dtype) for name, dtype in BYTES_DTYPES.items()},
        "parts": {
            name: torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
            for name, shape in {**shapes, "box": (2, 4)}.items()
        },
        "names": {"a.b": one(), "a": {"b": one()}, "w%x": one(), "\udc80": one(), (1, 2): one()},
        "loader": Loader(),
        "plain": [None, True, False, 0, -1, 200, -200, 1 << 40, (1 << 64) - 1, -(1 << 63), 2.5],
        "texts": ["", "text", "\u00e4\u6f22\U0001f600", "half \udc80", "x" * 40, b"", b"bytes"],
        "integers": [1 << 64, -(1 << 63) - 1, 1 << 70],
        "floats": [float("inf"), -0.0, 1e-300, 1 - 2j, complex("nan")],
        "tuples": ((), (1, (2, [3]))),
        "dicts": [
            {},
            {1: "int", (1, "2"): None, 2.5: 3, b"k": 4, None: 5, False: 6, Colour.RED: 7},
            OrderedDict(b=1, a=2),
            defaultdict(list, {"x": [1]}),
            defaultdict(None, {1: 2}),
            Counter({"a": 3, "b": -1}),
        ],
        "sets": [{"x", "y"}, set(), frozenset({1, 2, (3,)})],
        "deques": [deque([1, 2], maxlen=5), deque()],
        "numpy": [
            np.arange(3, dtype="<i4"),
            np.zeros((2, 0), "<f8"),
            np.array(["ab", "c"], "<U2"),
            np.array([0, 1], "<M8[ns]"),
            np.float32(1.5),
            np.bool_(True),
            np.datetime64(5, "D"),
        ],
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:0"), torch.device("cpu")],
        "paths": [
            pathlib.Path("/data/x"),
            pathlib.PurePosixPath("a/b"),
            pathlib.PureWindowsPath("C:/x"),
        ],
        "bytearray": bytearray(b"\x00\xff"),
        "registered": [Point(1), Point(2, (Point(3),)), Colour.RED, Mode.READ | Mode.WRITE],
        "decimal": decimal.Decimal("1.10"),
    }
    return state, {("parts", name): part for name, part in parts.items()}


def one():
    return torch.ones((), dtype=torch.float64)


def of_dtype(dtype):
    """Return two elements of any dtype, with bits that are known."""
    raw = torch.arange(1, 2 * dtype.itemsize + 1, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def golden_files():
    files = files_of(shard_of(state()), k=2, m=1)
    shard = shard_of(*golden_state(), Replicas(("parts.plain",), rank=1, ranks=3))
    return {"fragment.bin": files[2], "home.bin": files[HOME], "shard.safetensors": shard}


# -- golden files ---------------------------------------------------------------------------------


older_torch = pytest.mark.skipif(len(BYTES_DTYPES) < 4, reason="this torch lacks dtypes")


@pytest.mark.parametrize("name", ["fragment.bin", "home.bin"])
def test_golden(name):
    assert golden_files()[name] == (GOLDEN / name).read_bytes()


@older_torch
def test_golden_shard():
    """The encoder makes these bytes, as long as the format is version 1."""
    made, kept = golden_files()["shard.safetensors"], golden_shard()
    assert len(kept) < 16_384
    assert header_of(made) == header_of(kept)
    assert made == kept


def golden_shard():
    return (GOLDEN / "shard.safetensors").read_bytes()


def header_of(shard):
    return json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])


@older_torch
def test_golden_shard_gives_the_state_back():
    saved, parts = golden_state()
    read = read_shard(memoryview(golden_shard()))
    tree = resolve(read.tree(), lambda path, text: pytest.fail(f"{path}: {text}"))

    def live(node):
        return StoredObject("golden.Loader", node.state_dict()) if type(node) is Loader else node

    def stored(tensor, path):
        assert tensor.sharding == parts.get(path)
        return tensor.data

    loader = tree.pop("loader")
    expected = live(saved.pop("loader"))
    assert loader.kind == expected.kind
    loaded = replace_tensors(loader.state, stored)
    assert same(loaded, expected.state)
    whole = saved["parts"]["plain"]
    saved["parts"]["plain"] = whole.narrow(*parts["parts", "plain"].held)
    assert same(replace_tensors(tree, stored), saved)
    assert read.aliases == {"model.tied": "model.weight"}
    by_name = {**{f"parts.{path[1]}": part for path, part in parts.items()}}
    assert dict(read.shardings) == by_name
    for name, part in by_name.items():
        if part.coordinate:
            cut = part.cut()
            assert cut.shape == tuple(read.tensors[name].shape), name


def codes_in(data, found):
    """Add the codes of all extensions in some msgpack, those within others as well."""

    def extension(code, payload):
        found.add(code)
        if code not in (values.TENSOR, values.BIG_INT, values.COMPLEX, values.BYTEARRAY) and (
            code not in (values.DTYPE, values.DEVICE)
        ):
            codes_in(payload, found)
        return None if code == values.PAIRS else code

    msgpack.unpackb(data, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass")
    return found


def codes_in_the_code():
    names = {name: code for name, code in vars(values).items() if name.isupper()}
    return {code for name, code in names.items() if type(code) is int and name != "DEPTH_MAX"}


def test_golden_shard_has_every_code_dtype_and_kind_of_sharding():
    """A code without golden bytes is one that the next release may read in another way."""
    read = read_shard(memoryview(golden_shard()))
    assert codes_in(read.packed_tree, set()) == codes_in_the_code()
    header = header_of(golden_shard())
    assert {each["dtype"] for name, each in header.items() if name != "__metadata__"} == {
        *ITEM_BYTES
    }
    notes = {key: json.loads(text) for key, text in header["__metadata__"].items() if "{" in text}
    assert notes.keys() == {"ecckpt.dtypes", "ecckpt.aliases", "ecckpt.sharding"}
    assert set(notes["ecckpt.dtypes"].values()) == {
        "complex32",
        "complex128",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    }


def test_examples_of_shardings_are_those_of_the_golden_shard():
    text = header_of(golden_shard())["__metadata__"]["ecckpt.sharding"]
    examples = re.findall(r'^(\{"shape".*\})$', DOCUMENT, re.M)
    assert len(examples) == 3
    for example in examples:
        assert example in text


@pytest.mark.parametrize(("name", "index"), [("fragment.bin", 2), ("home.bin", HOME)])
def test_golden_is_read(name, index):
    data = (GOLDEN / name).read_bytes()
    header = parse_superblock(data, name)
    assert (header.index, header.k, header.m, header.rows) == (index, 2, 1, 2)
    assert header.file_bytes == len(data)
    table = parse_table(data[header.trailer_offset :], header, name)
    payload = data[SUPERBLOCK_BYTES : header.trailer_offset]
    size = header.fragment_bytes
    pieces = {2: payload} if index == 2 else {0: payload[:size], 1: payload[size:]}
    assert Codec(2, 1).verify(pieces, table, header.block_bytes) == []


def test_golden_shard_loads_with_safetensors_and_with_us():
    data = (GOLDEN / "home.bin").read_bytes()
    shard = data[SUPERBLOCK_BYTES:][: parse_superblock(data, "home").shard_bytes]
    plain = safetensors.torch.load(shard)
    assert torch.equal(plain["half"], state()["half"])
    read = read_shard(memoryview(shard))
    assert torch.equal(read.tensors["model.weight"], state()["model"]["weight"])
    assert torch.equal(read.tensors["double"], state()["double"])
    assert read.aliases == {"model.tied": "model.weight"}
    assert read.tree()["values"] == state()["values"]


# -- what the document says -----------------------------------------------------------------------


def test_numbers_in_the_document():
    data = (GOLDEN / "fragment.bin").read_bytes()
    assert data[:8].hex(" ") in DOCUMENT
    assert data[-8:].hex(" ") in DOCUMENT
    assert f"CRC32C of the nine bytes `123456789` is 0x{crc32c(b'123456789'):08X}" in DOCUMENT
    assert f"Version {FORMAT_VERSION}." in DOCUMENT
    assert f"at most {SUPERBLOCK_BYTES - 20}" in DOCUMENT
    for size in (0, 1, 832, 833, 4928, 4929, 10**9):
        for k in (1, 3, 8):
            least = -(-size // k)
            padded = next(n for n in range(least, least + 4096) if n % 4096 == 832)
            assert fragment_bytes_for(size, k) == padded


def test_header_fields_in_the_document():
    section = DOCUMENT.split("**Header**")[1].split("**Padding rule.**")[0]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", section, re.M)))
    header = parse_superblock((GOLDEN / "home.bin").read_bytes(), "home")
    assert listed == list(header.to_wire())


def test_extension_codes_in_the_document():
    section = DOCUMENT.split("| code | meaning | payload |")[1].split("\n\n")[0]
    columns = re.findall(r"^\| ([\d, ]+) \|", section, re.M)
    listed = [int(code) for column in columns for code in column.split(",")]
    assert listed == sorted(codes_in_the_code())


def test_names_in_the_document():
    section = DOCUMENT.split("| path in the state | name |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \|$", section, re.M)
    assert len(rows) == 7
    paths = [tuple(eval(path)) for path, _ in rows]
    assert tensor_names(paths) == [name for _, name in rows]


def test_digests_in_the_document():
    """Of a tensor and of a value, as the document says."""

    planner = SimpleNamespace(state_dict={"w": torch.arange(3.0), "n": {"lr": 0.5}})
    tree = msgpack.packb({"w": msgpack.ExtType(0, bytes(4))})
    w = zlib.crc32(np.arange(3, dtype="<f4"), zlib.crc32(b"torch.float32 [3] ", zlib.crc32(tree)))
    n = zlib.crc32(msgpack.packb({"n": {"lr": 0.5}}))
    assert dcp._digests(planner) == {"w": w, "n": n}
    assert "`torch.float32 [3] `" in DOCUMENT


def test_run_state_in_the_document():
    section = DOCUMENT.split("## 5. Run state")[1].split("## 6.")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.M)
    guard = Guard(
        run="r",
        writer=writer_of(1),
        members=(),
        holders=0,
        local_ranks=1,
        memory_bytes=0,
        timeout_s=1.0,
    )
    fields = msgpack.unpackb(pack_notes(RunNotes(fence=3, guard=guard))[4:])
    assert listed == list(fields)
    assert (fields["restored_by"], fields["committed"]) == (0, "")
    assert msgpack.unpackb(fields["guard"])["run"] == "r"


def test_names_of_files_on_disk_in_the_document():
    header = parse_superblock((GOLDEN / "home.bin").read_bytes(), "home")
    generation = header.shard.generation
    assert _name(header) == f"golden@{generation}@1@home.ecckpt"
    assert _name(header.at(2)) == f"golden@{generation}@1@2.ecckpt"
    assert f"`{_name(header)}`" in DOCUMENT


def test_factories_in_the_document():
    line = DOCUMENT.split("\nFactories: ")[1].split("\n")[0]
    assert re.findall(r"`(\w+)`", line) == list(values.FACTORIES)


# -- the readers in the document ------------------------------------------------------------------


def script_of(name):
    """Return a program of the document, which does without ecckpt."""
    scripts = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    (script,) = [each for each in scripts if f"python {name}" in each]
    assert "import ecckpt" not in script
    assert "from ecckpt" not in script
    return script


@pytest.fixture
def recover(tmp_path):
    """Run the document's reader in a process of its own on these files."""
    script = script_of("recover.py")
    (tmp_path / "recover.py").write_text(script)

    def run(files):
        paths = [tmp_path / f"{number}.region" for number in range(len(files))]
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
        command = [sys.executable, "recover.py", "out.safetensors", *map(str, paths)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        out = tmp_path / "out.safetensors"
        return done.stderr, out.read_bytes() if out.exists() else None

    return run


def test_reader_rebuilds_missing_data_fragments(recover):
    shard = shard_of(state())
    files = files_of(shard, k=3, m=2)
    spare = b"what a longer file had before"
    assert recover([files[4] + spare, files[1], files[3]]) == ("", shard)


@older_torch
def test_readers_read_the_golden_shard(recover, tmp_path):
    """Fragments to shard, and shard to tree, by what the document says alone."""
    files = files_of(golden_shard(), k=3, m=2)
    assert recover([files[4], files[1], files[3]]) == ("", golden_shard())
    (tmp_path / "values.py").write_text(script_of("values.py"))
    command = [sys.executable, "values.py", str(GOLDEN / "shard.safetensors")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.stderr == b""
    lines = done.stdout.decode("utf-8", "surrogatepass").splitlines()
    told = dict(line.split(" = ", 1) for line in lines)
    assert told["plain"] == repr(golden_state()[0]["plain"])
    assert told["integers"] == repr(golden_state()[0]["integers"])
    assert told["tuples"] == "tuple([tuple([]), tuple([1, tuple([2, [3]])])])"
    assert told["model"] == (
        "{'weight': <model.weight>, 'tied': <model.tied>, 'empty': <model.empty>, "
        "'scalar': <model.scalar>}"
    )
    assert told["decimal"] == "registered(['golden.Decimal', '1.10'])"
    assert told["bytearray"] == "bytearray(b'\\x00\\xff')"
    assert told.keys() == golden_state()[0].keys()


def test_reader_takes_a_home_copy(recover):
    shard = shard_of(state())
    assert recover([files_of(shard, k=2, m=1)[HOME]]) == ("", shard)


def test_reader_refuses_a_flipped_bit(recover):
    files = files_of(shard_of(state()), k=2, m=1)
    bad = bytearray(files[2])
    bad[SUPERBLOCK_BYTES + 4100] ^= 1
    assert recover([files[0], bytes(bad)])[1] is None
    errors, _ = recover([files[0], bytes(bad)])
    assert "block 1 of fragment 2" in errors


def test_reader_refuses_too_few(recover):
    files = files_of(shard_of(state()), k=2, m=1)
    errors, shard = recover([files[2]])
    assert shard is None
    assert "1 fragments, 2 needed" in errors


def test_reader_knows_every_choice_of_fragments(tmp_path):
    """All choices in one process: the functions of the document, not its last lines."""
    script = script_of("recover.py")
    names = {}
    exec(script.split("\nshard = recover(")[0], names)
    shard = shard_of(state())
    files = files_of(shard, k=3, m=2)
    for index, data in files.items():
        (tmp_path / str(index)).write_bytes(data)
    for chosen in combinations(range(5), 3):
        assert names["recover"]([tmp_path / str(index) for index in chosen]) == shard


if __name__ == "__main__":
    register_golden()
    for name, data in golden_files().items():
        (GOLDEN / name).write_bytes(data)
