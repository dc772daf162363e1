"""docs/FORMAT.md against the code: golden files, and its own reader run on real fragments.

To write the golden files anew (only together with a new format version):
``python tests/docs/test_format.py``
"""

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

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
from ecckpt.state.file.shard import read_shard
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tree import values

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


def shard_of(tree):
    plan = plan_shard(tree)
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


def golden_files():
    files = files_of(shard_of(state()), k=2, m=1)
    return {"fragment.bin": files[2], "home.bin": files[HOME]}


# -- golden files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fragment.bin", "home.bin"])
def test_golden(name):
    assert golden_files()[name] == (GOLDEN / name).read_bytes()


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
    assert listed == list(range(values.REGISTERED + 1))


def test_factories_in_the_document():
    line = DOCUMENT.split("\nFactories: ")[1].split("\n")[0]
    assert re.findall(r"`(\w+)`", line) == list(values.FACTORIES)


# -- the reader in the document -------------------------------------------------------------------


@pytest.fixture
def recover(tmp_path):
    """Run the document's reader in a process of its own on these files."""
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    assert "import ecckpt" not in script
    assert "from ecckpt" not in script
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
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    names = {}
    exec(script.split("\nshard = recover(")[0], names)
    shard = shard_of(state())
    files = files_of(shard, k=3, m=2)
    for index, data in files.items():
        (tmp_path / str(index)).write_bytes(data)
    for chosen in combinations(range(5), 3):
        assert names["recover"]([tmp_path / str(index) for index in chosen]) == shard


if __name__ == "__main__":
    for name, data in golden_files().items():
        (GOLDEN / name).write_bytes(data)
