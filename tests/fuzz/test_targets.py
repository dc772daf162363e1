"""Parsers of bytes that others wrote: the kept corpus, and mutations of good inputs.

``python -m tests.fuzz.run`` does the same for hours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import EcckptError
from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    for seed in seeds(name):
        with suppress(EcckptError):
            TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_cut_off_anywhere(name: str) -> None:
    for seed in seeds(name):
        for length in range(0, len(seed), 1 + len(seed) // 100):
            with suppress(EcckptError):
                TARGETS[name](seed[:length])


@st.composite
def mutated(draw: Callable[..., bytes], inputs: list[bytes]) -> bytes:
    """A good input with a few pieces changed, doubled, taken out or put in from another."""
    data = bytearray(draw(st.sampled_from(inputs)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, 16))
        other = draw(st.sampled_from(inputs))
        start = draw(st.integers(0, len(other)))
        pieces = [
            draw(st.binary(max_size=9)),
            other[start : start + 40],
            bytes(data[at:end]) * 3,
            bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[at:end]),
        ]
        data[at:end] = draw(st.sampled_from(pieces))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    @settings(max_examples=150)
    @given(mutated(seeds(name)))
    def parse(data: bytes) -> None:
        with suppress(EcckptError):
            TARGETS[name](data)

    parse()
