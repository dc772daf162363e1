"""What an agent's core decides about reading its disk again and again: no disk, no clock."""

from pathlib import Path

import pytest

from ecckpt.agent.core import actions as act
from ecckpt.agent.core.core import Core
from ecckpt.agent.storage.disk import DiskFile
from ecckpt.errors import EcckptError
from ecckpt.format.fragment_file import HOME
from tests.support.builders import header, table_of
from tests.support.hands import BUDGET, NEW, OLD, Hands

RATE = 10e6


def hands_with(*, disk=True, rate=RATE):
    hands = Hands()
    hands.core = Core(
        node="n1", address="n1:1", budget_bytes=BUDGET, disk=disk, scrub_bytes_per_s=rate
    )
    return hands


def keep(hands, index, gen=NEW):
    head = header(index=index, gen=gen)
    file = DiskFile(Path(f"{head.shard}.{index}"), head, table_of(head))
    hands.core.records.keep_file(file)
    return file


def wakes(hands):
    found = [each for each in hands.settled if isinstance(each, act.Wake)]
    hands.settled.clear()
    return found


@pytest.fixture
def hands():
    hands = hands_with()
    keep(hands, HOME)
    keep(hands, 2)
    keep(hands, 1, gen=OLD)
    hands.tell(act.Begun())
    return hands


def start(hands):
    (wake,) = wakes(hands)
    hands.now_s = wake.at_s
    hands.tell(act.Due(wake.task))


def checked(hands, verdict=""):
    check = hands.next(act.Check)
    assert check.bytes_per_s == RATE
    hands.tell(act.Finished(check, verdict))
    return check.file.header.shard.generation, check.file.header.index


@pytest.mark.parametrize(("disk", "rate"), [(False, RATE), (True, 0.0)])
def test_nothing_is_read_without_a_disk_or_a_rate(disk, rate):
    hands = hands_with(disk=disk, rate=rate)
    hands.tell(act.Begun())
    assert not hands.todo
    assert not wakes(hands)


def test_a_round_comes_after_a_rest_and_reads_one_file_at_a_time_the_oldest_first(hands):
    assert not hands.todo
    start(hands)
    seen = [checked(hands) for _ in range(3)]
    assert seen[0] == (OLD, 1)
    assert set(seen[1:]) == {(NEW, HOME), (NEW, 2)}
    assert not hands.todo
    keep(hands, 3)
    start(hands)
    assert len([checked(hands) for _ in range(4)]) == 4


def test_a_file_that_has_gone_meanwhile_is_not_read(hands):
    start(hands)
    ledger = hands.core.records.get_or_create("test")
    hands.core.records.remove("test", [f for f in ledger.files.values() if f.header.index == 2])
    assert [checked(hands), checked(hands)] == [(OLD, 1), (NEW, HOME)]
    assert not hands.todo


def test_what_is_bad_is_said_once_and_stays(hands):
    for _ in range(2):
        start(hands)
        for _ in range(3):
            checked(hands, "2 of 9 blocks fail")
    warned = [each for each in hands.settled if isinstance(each, act.Warn)]
    ledger = hands.core.records.get("test")
    assert len(ledger.damaged) == len(ledger.files) == 3
    assert not warned  # in the second round


def test_news_are_told(hands):
    start(hands)
    checked(hands, "2 of 9 blocks fail")
    (warn,) = [each for each in hands.settled if isinstance(each, act.Warn)]
    assert "2 of 9 blocks fail" in warn.text


def test_a_check_that_fails_says_nothing_and_the_round_goes_on(hands):
    start(hands)
    hands.tell(act.Failed(hands.next(act.Check), EcckptError("unexpected")))
    assert not hands.core.records.get("test").damaged
    checked(hands)
    checked(hands)
    assert len(wakes(hands)) == 1
