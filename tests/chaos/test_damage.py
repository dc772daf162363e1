"""Every byte of superblocks and tables, every truncation, and a sample of payloads."""

from __future__ import annotations

from tests.chaos.damage import payloads, superblocks_and_tables


def test_every_byte_of_superblock_and_table_and_every_length() -> None:
    tried = superblocks_and_tables()
    assert tried["byte"] == 4096 + 32  # RS(3, 2), one row: a table of 20 bytes, its CRC, end mark
    assert tried["cut"] == 4096 + 832 + 32


def test_payloads() -> None:
    tried = payloads(seed=1, rounds=10)
    assert tried["a block: flip"] == tried["a block: zero"] == 2 * 15 + 10
