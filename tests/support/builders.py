"""Headers, inventories, classes of messages and hypothesis strategies for several test files."""

import importlib
import pkgutil
from dataclasses import is_dataclass

import numpy as np
from hypothesis import strategies as st

from ecckpt.format.fragment_file import BLOCK_BYTES, HOME, Header, fragment_bytes_for
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.policy.survival import Inventory
from ecckpt.protocol import messages

SESSION = "0123456789abcdef"


def writer_of(timeline=1):
    return RunWriter(timeline, SESSION)


def generation(timeline=1, step=10, session=SESSION):
    return Generation(timeline, step, session)


def header(index=HOME, *, rank=0, world_size=8, k=3, m=2, shard_bytes=10_000, **fields):
    """A header that fits together; ``gen``, ``run``, ``block_bytes``, ... as in ``Header``."""
    shard = ShardId(fields.pop("run", "test"), fields.pop("gen", generation()), rank)
    return Header(
        shard=shard,
        world_size=world_size,
        index=index,
        k=k,
        m=m,
        shard_bytes=shard_bytes,
        fragment_bytes=fragment_bytes_for(shard_bytes, k),
        **{
            "block_bytes": BLOCK_BYTES,
            "home": "n0",
            "parent": None,
            "created_unix_s": 1_700_000_000,
        }
        | fields,
    )


def table_of(header, seed=1):
    """A checksum table of the right shape; its numbers are made up."""
    noise = np.random.default_rng(seed)
    return noise.integers(0, 1 << 32, (header.n, header.rows), dtype=np.uint32)


def inventory(
    node, headers=(), *, disk=(), stored=(), committed=None, fence=0, roll_backs=(), rejected=None
):
    return Inventory(
        node=node,
        headers=Headers.from_headers(headers),
        disk=Headers.from_headers(disk),
        stored=tuple(stored),
        committed=committed,
        fence=fence,
        roll_backs=tuple(roll_backs),
        rejected=rejected or {},
    )


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
whole = st.integers(0, 10**18 - 1)
generations = st.builds(
    Generation, whole, whole, st.binary(min_size=8, max_size=8).map(lambda raw: raw.hex())
)


@st.composite
def headers(draw, max_shard_bytes=(1 << 48) - 1):
    k = draw(st.integers(1, 256))
    m = draw(st.integers(0, 256 - k))
    world_size = draw(st.integers(1, 1 << 24))
    return header(
        draw(st.integers(HOME, k + m - 1)),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        k=k,
        m=m,
        shard_bytes=draw(st.integers(0, max_shard_bytes)),
        run=draw(names),
        gen=draw(generations),
        block_bytes=draw(st.integers(4096, 1 << 30)),
        home=draw(names),
        parent=draw(st.none() | generations),
        created_unix_s=draw(st.integers(0, 1 << 40)),
    )


def message_classes():
    """Return the dataclasses of ``ecckpt.protocol.messages``, in order of their names."""
    names = [each.name for each in pkgutil.iter_modules(messages.__path__, messages.__name__ + ".")]
    modules = [importlib.import_module(name) for name in names]
    found = [
        each
        for module in modules
        for each in vars(module).values()
        if is_dataclass(each) and each.__module__ == module.__name__
    ]
    return sorted(found, key=lambda each: each.__name__)
