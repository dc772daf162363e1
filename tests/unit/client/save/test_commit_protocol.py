"""How a save is seen through, effect by effect, and in every order that ranks can come in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.client import deadlines
from ecckpt.client.effects import (
    OWN,
    CallAgent,
    FinishHandle,
    Now,
    Report,
    Routine,
    StoreAdd,
    StoreDrop,
    StoreGet,
    StorePut,
    StoreSubtract,
    StoreWait,
    Until,
)
from ecckpt.client.events import Message, SaveCommitted, SaveFailure
from ecckpt.client.handles import SaveHandle
from ecckpt.client.save.commit_protocol import POISON, CommitProtocol
from ecckpt.client.save.staging import Deadline
from ecckpt.errors import AgentUnreachable, Fenced, SaveFailed, SaveTimedOut
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Commit, Progress, Watch
from ecckpt.protocol.verbs import COMMIT, PROTECT, WATCH
from tests.support.builders import generation
from tests.support.commits import GEN, Commits, cluster_of
from tests.support.performers import STORE_EFFECTS, Choose, Running, drive, explore, pass_time

SHARD = ShardId("test", GEN, 0)
STALE = Fenced(timeline=1, current=2)
GONE = AgentUnreachable("n0", "gone")
NO_STORE = SaveFailed("the store is gone")
DEADLINE_S = 100.0

# -- effect by effect -----------------------------------------------------------------------------


class Play:
    """Two ranks, seen by the first; the script says which effects come, and what comes of them."""

    def __init__(self, *, counted: bool = True, share: tuple[str, ...] = ()) -> None:
        self.handle = SaveHandle(GEN, GEN.step)
        self.protocol = CommitProtocol(cluster_of(0, 2, share=share))
        self.now_s = 0.0
        save = Commits(1, counted=counted).staged(0)
        deadline = Deadline(SHARD, DEADLINE_S)
        self.ended_with: list[Any] = []
        self.save = replace(save, handle=self.handle, deadline=deadline, ended=self._ended)
        self.events: list[Any] = []

    def _ended(self, error: Any) -> Routine[None]:
        self.ended_with.append(error)
        yield from ()

    def __call__(self, *script: tuple[Any, Any], routine: Routine[None] | None = None) -> Any:
        """Returns the error with which the handle ended."""
        routine = routine or self.protocol.see_through(self.save)
        todo, effect = list(script), next(routine)
        while True:
            result: Any = None
            match effect:
                case Now():
                    result = self.now_s
                case Report(event):
                    self.events.append(event)
                case FinishHandle(handle, error):
                    assert handle is self.handle
                    handle.finish(error, self.now_s)
                case _:
                    expected, result = todo.pop(0)
                    if callable(result):
                        result = result(self)
                    assert effect == expected
            try:
                if isinstance(result, Exception):
                    effect = routine.throw(result)
                else:
                    effect = routine.send(result)
            except StopIteration:
                assert todo == []
                assert self.handle.left
                return self.handle.error


def watch(known, wait_s=deadlines.WATCH_S):
    return CallAgent(WATCH, Watch(SHARD, known, wait_s), OWN, deadlines.CALL_S)


def progress(state):
    return Progress(state=state, held=3, problems=(), encode_s=0.0, protected_s=0.0)


def added(counter, value):
    return StoreAdd(f"{counter}/{GEN}", 1), value


def seen(counter, value):
    return StoreAdd(f"{counter}/{GEN}", 0), value


def wake(counter, result=None):
    return StorePut(f"{counter}/{GEN}/wake", b""), result


def await_count(result=None, *, wait_s=deadlines.STORE_WAIT_S):
    return StoreWait(f"count/{GEN}/wake", wait_s), result


def look_left(result):
    return StoreGet(f"left/{GEN}/wake"), result


def pause(wait_s, result=False):
    """Compared by its length alone: its condition is a function of the protocol's own."""
    return Pause(wait_s), result


class Pause:
    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Until) and other.timeout_s == self.wait_s

    def __hash__(self) -> int:
        return 0


def give_up(result):
    return StoreSubtract(f"count/{GEN}", POISON, 2), result


def late(play: Play) -> None:
    play.now_s = DEADLINE_S


TELL = CallAgent(COMMIT, Commit("test", GEN), OWN, deadlines.CALL_S)
PROTECTED = (
    (CallAgent(PROTECT, None, OWN, 10.0), None),
    (watch("encoding"), progress("scattering")),
    seen("count", 0),
    (watch("scattering"), progress("protected")),
)
LAST = (added("count", 2), wake("count"))
FIRST = (added("count", 1), await_count())
TOLD = (TELL, None)
LEFT = (added("left", 2), wake("left"))
GIVEN_UP = (give_up(True), wake("count"))


def test_whoever_completes_the_count_wakes_the_others_and_tells_its_own_agent():
    play = Play()
    assert play(*PROTECTED, *LAST, TOLD, *LEFT) is None
    assert play.events == [SaveCommitted(SHARD)]
    assert (play.handle.protected, play.handle.held) == (True, 3)


def test_the_others_are_woken_and_tell_their_own():
    assert Play()(*PROTECTED, *FIRST, seen("count", 2), TOLD, *LEFT) is None


def test_who_is_woken_by_nobody_finds_the_count_complete():
    again = (seen("count", 1), await_count(), seen("count", 2))
    assert Play()(*PROTECTED, *FIRST, *again, TOLD, *LEFT) is None


def test_a_share_of_the_nodes_without_ranks_is_told_before_the_save_is_left():
    play = Play(share=("n2", "n3"))
    share = [
        (CallAgent(COMMIT, Commit("test", GEN), node, deadlines.COMMIT_S), None)
        for node in ("n2", "n3")
    ]
    assert play(*PROTECTED, *LAST, TOLD, *share, *LEFT) is None


def test_who_leaves_first_looks_for_the_others_less_and_less_often():
    waiting = (
        added("left", 1),
        *(look_left(None), pause(0.001)),
        *(look_left(None), pause(0.002)),
        look_left(b""),
        seen("left", 2),
    )
    assert Play()(*PROTECTED, *LAST, TOLD, *waiting) is None


@pytest.mark.parametrize(
    "waiting",
    [
        (look_left(NO_STORE),),
        (look_left(None), pause(0.001, late), look_left(None)),
        (look_left(b""), seen("left", NO_STORE)),
    ],
    ids=["no store", "late", "no store then"],
)
def test_a_rank_that_cannot_wait_for_the_others_goes_on(waiting):
    assert Play()(*PROTECTED, *LAST, TOLD, added("left", 1), *waiting) is None


def test_what_is_not_counted_ends_protected():
    play = Play(counted=False)
    assert play(*(each for each in PROTECTED if each != seen("count", 0))) is None
    assert play.events == []


@pytest.mark.parametrize("state", ["failed", "unknown"])
def test_a_shard_that_is_not_protected_is_given_up(state):
    play = Play()
    error = play(PROTECTED[0], (watch("encoding"), progress(state)), *GIVEN_UP, *LEFT)
    assert isinstance(error, SaveFailed)
    assert play.events == [SaveFailure(SHARD, error)]


def test_a_save_that_another_rank_gave_up_is_given_up_at_once_or_when_woken():
    at_once = (*PROTECTED[:2], seen("count", -5))
    assert "another rank" in str(Play()(*at_once, *GIVEN_UP, *LEFT))
    counting = (*PROTECTED, added("count", -5))
    assert "another rank" in str(Play()(*counting, *GIVEN_UP, *LEFT))
    woken = (*PROTECTED, *FIRST, seen("count", -5))
    assert "another rank" in str(Play()(*woken, *GIVEN_UP, *LEFT))


@pytest.mark.parametrize(
    ("waiting", "kind"),
    [
        ((await_count(NO_STORE),), SaveFailed),
        ((await_count(late), seen("count", 1)), SaveTimedOut),
    ],
    ids=["no store", "late"],
)
def test_an_error_gives_the_save_up_unless_all_have_counted(waiting, kind):
    failing = (*PROTECTED, added("count", 1), *waiting)
    assert type(Play()(*failing, *GIVEN_UP, *LEFT)) is kind
    play = Play()
    assert play(*failing, give_up(False), TOLD, *LEFT) is None
    assert play.events == [SaveCommitted(SHARD)]


# The rank has counted, and then the store does not answer: other ranks may see a complete count.
DOUBT = (*PROTECTED, added("count", NO_STORE), give_up(NO_STORE))
ASK_AGAIN = pause(deadlines.ASK_STORE_AGAIN_S)


def test_a_rank_in_doubt_keeps_its_shard_until_the_store_tells_that_it_is_given_up():
    play = Play()
    script = (*DOUBT, ASK_AGAIN, give_up(NO_STORE), ASK_AGAIN, give_up(True), wake("count"))
    error = play(*script, *LEFT)
    assert "does not tell whether it is committed" in str(error)
    assert error.hint == "the shard is kept; saves go on when the store answers"
    assert [type(each) for each in play.events] == [Message, SaveFailure, Message]
    assert play.ended_with == [NO_STORE]


def test_a_rank_in_doubt_learns_that_the_save_is_committed_and_tells_its_agent():
    play = Play(share=("n2",))
    told = (CallAgent(COMMIT, Commit("test", GEN), "n2", deadlines.COMMIT_S), None)
    assert play(*DOUBT, ASK_AGAIN, give_up(False), TOLD, told, *LEFT) is play.handle.error
    assert [type(each) for each in play.events] == [Message, SaveFailure, SaveCommitted]
    assert play.ended_with == [None]


def test_a_rank_in_doubt_lets_no_save_begin():
    play, waiting = Play(), []

    def waits(play: Play) -> bool:
        waiting.append((play.handle.left, play.handle.done, play.handle.waits_for))
        return False

    play(*DOUBT, pause(deadlines.ASK_STORE_AGAIN_S, waits), give_up(True), wake("count"), *LEFT)
    assert waiting == [
        (False, True, "waiting for the ranks' store to tell whether it is committed")
    ]


def test_a_doubt_ends_with_the_program_or_a_restore_and_gives_nothing_up():
    play = Play()
    play(*DOUBT, pause(deadlines.ASK_STORE_AGAIN_S, True))
    assert play.ended_with == []
    assert play.protocol._is_moot(SHARD) is False
    play.protocol.timeline = GEN.timeline + 1
    assert play.protocol._is_moot(SHARD) is True


def test_a_rank_that_has_not_counted_is_in_no_doubt():
    play = Play()
    failed = (*PROTECTED[:-1], (watch("scattering"), progress("failed")), give_up(NO_STORE))
    assert isinstance(play(*failed, *LEFT), SaveFailed)
    assert len(play.ended_with) == 1


def test_ranks_do_not_look_again_and_again_for_one_that_could_not_give_up():
    """Its subtraction failed and its wake did not: the others asked the store without a pause."""
    commits = Commits(2)
    commits.state = ["protected", "failed"]
    subtracts = StoreSubtract
    commits.performers[1].fail = lambda each: NO_STORE if isinstance(each, subtracts) else None
    commits.follow_all()
    _drive(commits, commits.all_left)
    assert commits.outcomes() == [SaveTimedOut, SaveFailed]
    assert sum(isinstance(each, StoreWait) for each in commits.performers[0].done) < 4


def test_an_agent_that_is_away_is_told_before_the_next_save_begins():
    away = ((TELL, GONE), (TELL, GONE), pause(deadlines.TELL_AGAIN_S), TOLD)
    assert Play()(*PROTECTED, *LAST, *away, *LEFT) is None
    gone = ((TELL, GONE), (TELL, GONE), pause(deadlines.TELL_AGAIN_S, late), (TELL, GONE))
    assert Play()(*PROTECTED, *LAST, *gone, *LEFT) is None


def test_an_agent_that_is_away_is_told_no_more_once_the_program_ends():
    away = ((TELL, GONE), (TELL, GONE), pause(deadlines.TELL_AGAIN_S, True))
    assert Play()(*PROTECTED, *LAST, *away, *LEFT) is None


def test_an_agent_that_is_away_and_then_fences_is_told_no_more():
    away = ((TELL, GONE), (TELL, STALE))
    assert Play()(*PROTECTED, *LAST, *away, *LEFT) is None


def test_a_writer_that_was_fenced_off_never_calls_a_save_committed():
    assert Play()(*PROTECTED, *LAST, (TELL, STALE), give_up(False), *LEFT) is STALE


def test_an_error_without_counting_is_the_end_of_it():
    assert Play(counted=False)((PROTECTED[0][0], GONE)) is GONE


def test_a_shard_that_will_not_come_wakes_the_others_and_is_left():
    play = Play()
    routine = play.protocol.abandon(play.handle, play.save.deadline)
    play(*GIVEN_UP, *LEFT, routine=routine)


def test_nothing_keeps_a_save_from_being_left():
    play = Play()
    bug = ValueError("a bug")
    routine = play.protocol.abandon(play.handle, play.save.deadline)
    play(give_up(bug), routine=routine)
    assert play.events == [Message(40, f"following {SHARD}: ValueError('a bug')")]
    play = Play()
    assert play(*PROTECTED, *LAST, TOLD, added("left", bug)) is None
    assert play.handle.left


def test_the_keys_of_a_save_go_when_all_have_left_the_next_one():
    commits = Commits(2)
    newer = generation(step=11)
    commits.state = ["protected"] * 2
    for gen in (GEN, newer):
        running = commits.follow_all(gen)
        _drive(commits, lambda each=running: all(one.ended for one in each))
    assert commits.outcomes() == [None, None]
    assert commits.store.names() == {
        f"{counter}/{newer}{wake}" for counter in ("count", "left") for wake in ("", "/wake")
    }
    drops = [each for one in commits.performers for each in one.done if isinstance(each, StoreDrop)]
    assert len(drops) == 4


# -- in every order -------------------------------------------------------------------------------


def _drive(commits: Commits, done, choose: Choose = lambda count: 0) -> None:
    drive(commits.performers, done, choose, among=STORE_EFFECTS)


class Trouble:
    """What may happen to a rank at any of its effects in the store, a few times in all."""

    def __init__(self, commits: Commits, kinds: tuple[str, ...], most: int) -> None:
        self.commits, self.kinds, self.left = commits, kinds, most
        self.met: set[str] = set()
        self.dead: set[int] = set()

    def options(self) -> list[tuple[str, int]]:
        if not self.left:
            return []
        at_store = {
            rank
            for rank, performer in enumerate(self.commits.performers)
            if any(isinstance(each.effect, STORE_EFFECTS) for each in performer.running)
        }
        return [(kind, rank) for kind in self.kinds for rank in sorted(at_store - self.dead)]

    def happen(self, kind: str, rank: int) -> None:
        self.left -= 1
        self.met.add(kind)
        performer = self.commits.performers[rank]
        (running,) = performer.running
        if kind == "dies":
            self.dead.add(rank)
            performer.running.clear()
        elif kind == "is late":
            performer.late_s += 2 * self.commits.timeout_s
        elif kind == "is refused":
            running.throw(SaveFailed("the ranks' store: refused"))
        elif kind == "is not answered":
            if running.is_ready():
                performer.perform(running.effect, late=False)
            running.throw(SaveFailed("the ranks' store: not answered"))
        elif kind == "closes":
            self.commits.protocols[rank].closing = True


def play_out(commits: Commits, trouble: Trouble, choose: Choose) -> None:
    """Until all ranks that live have ended."""
    while any(performer.running for performer in commits.performers):
        running = [each for performer in commits.performers for each in performer.running]
        ready = [each for each in running if each.is_ready()]
        local = [each for each in ready if not isinstance(each.effect, STORE_EFFECTS)]
        if local:
            local[0].step()
            continue
        options: list[Any] = [*ready, *trouble.options()]
        if not ready:
            options.insert(0, None)
        option = options[choose(len(options))]
        if option is None:
            pass_time(commits.performers)
        elif isinstance(option, Running):
            option.step()
        else:
            trouble.happen(*option)


def check_end(commits: Commits, trouble: Trouble, *, ranks: int, fenced: frozenset[int]) -> None:
    alive = [rank for rank in commits.handles if rank not in trouble.dead]
    assert all(commits.handles[rank].left and commits.handles[rank].done for rank in alive)
    committed = [rank for rank in alive if commits.handles[rank].committed]
    # What is told to agents is final.
    if commits.told or committed:
        assert commits.count == ranks
    if commits.count < 0:
        assert not commits.told
        assert not committed
    # Ranks agree, but one that lost the store, or was replaced, may not know better.
    if not trouble.met & {"is refused", "is not answered"}:
        assert len({commits.handles[rank].committed for rank in alive if rank not in fenced}) <= 1


def scenario(
    kinds: tuple[str, ...], *, ranks: int = 2, most: int = 1, state: tuple[str, ...] = (), **refuse
):
    def play(choose: Choose) -> None:
        commits = Commits(ranks, timeout_s=5.0)
        commits.state = list(state or ("protected",) * ranks)
        commits.refuse = dict(refuse)
        trouble = Trouble(commits, kinds, most)
        commits.follow_all()
        play_out(commits, trouble, choose)
        fenced = frozenset(rank for rank in range(ranks) if refuse.get(f"n{rank}") is STALE)
        check_end(commits, trouble, ranks=ranks, fenced=fenced)
        if not trouble.met:
            expected = {"protected"} == set(commits.state)
            assert all(
                handle.committed == (expected and rank not in fenced)
                for rank, handle in commits.handles.items()
            )

    return play


@pytest.mark.parametrize("kind", ["dies", "is late", "is refused", "is not answered", "closes"])
def test_two_ranks_in_every_order_with_one_trouble_anywhere(kind):
    assert explore(scenario((kind,))) > 100


@pytest.mark.parametrize("refuse", [{}, {"n0": STALE}, {"n1": GONE}], ids=["", "fenced", "away"])
def test_two_ranks_in_every_order_with_one_that_fails_or_is_refused(refuse):
    explore(scenario((), state=("protected", "failed"), **refuse))
    explore(scenario((), **refuse))


NODES = ("n0", "n1", "n2", "n3")


@given(
    choices=st.lists(st.integers(0, 1 << 20), max_size=60),
    state=st.lists(st.sampled_from(["protected"] * 5 + ["failed"]), min_size=1, max_size=4),
    refuse=st.dictionaries(st.sampled_from(NODES), st.sampled_from([STALE, GONE]), max_size=2),
    most=st.integers(0, 3),
)
@settings(max_examples=200)
def test_any_ranks_in_any_order_with_any_troubles(choices, state, refuse, most):
    kinds = ("dies", "is late", "is refused", "is not answered", "closes")
    play = scenario(kinds, ranks=len(state), most=most, state=tuple(state), **refuse)
    to_come = iter(choices)
    play(lambda count: next(to_come, 0) % count)
