"""All ranks commit a save or none does, also if a rank fails, is late or dies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecckpt.client import deadlines
from ecckpt.client.effects import CallAgent, Routine
from ecckpt.client.handles import SaveHandle
from ecckpt.errors import AgentUnreachable, Fenced, SaveFailed, SaveTimedOut
from ecckpt.protocol.verbs import COMMIT
from tests.support.builders import generation
from tests.support.commits import GEN, Commits
from tests.support.performers import drive

GONE = AgentUnreachable("here", "gone")


def until(commits: Commits, done) -> None:
    drive(commits.performers, done)


def all_done(commits: Commits) -> list[type | None]:
    until(commits, commits.all_done)
    return commits.outcomes()


# -- one save -------------------------------------------------------------------------------------


def test_protected_everywhere_is_committed_everywhere():
    commits = Commits(3)
    commits.follow_all()
    commits.state[:2] = ["protected"] * 2
    until(commits, lambda: commits.count == 2)
    assert not any(handle.committed for handle in commits.handles.values())
    assert commits.told == []
    commits.state[2] = "protected"
    assert all_done(commits) == [None] * 3
    assert sorted(commits.told_nodes()) == ["n0", "n1", "n2"]
    handle = commits.handles[0]
    assert all(each.protected and each.done for each in commits.handles.values())
    assert (handle.held, handle.encode_s, handle.protected_s) == (5, 0.5, 0.75)
    assert [error for _, error in commits.ended] == [None] * 3


def test_one_rank_that_fails_fails_all_and_commits_nothing():
    commits = Commits(3)
    commits.follow_all()
    commits.state = ["protected", "protected", "failed"]
    commits.problems = ("fragment 1 at n4: no room",)
    assert all_done(commits) == [SaveFailed] * 3
    assert "fragment 1 at n4: no room" in str(commits.handles[2].error)
    assert "another rank could not protect its shard" in str(commits.handles[0].error)
    assert commits.told == []
    with pytest.raises(SaveFailed, match="rank 0"):
        commits.handles[0].wait(1)


def test_an_agent_that_forgot_the_shard_fails_the_save():
    commits = Commits(1)
    commits.follow(0)
    commits.state = ["unknown"]
    assert all_done(commits) == [SaveFailed]
    assert "the agent was restarted meanwhile" in str(commits.handles[0].error)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (GONE, AgentUnreachable),
        (Fenced(timeline=1, current=2), Fenced),
        (KeyError("a bug"), SaveFailed),
        (OSError("a file"), SaveFailed),
    ],
)
def test_a_save_that_cannot_start_fails_all(raised, kind):
    def begin() -> Routine[None]:
        raise raised
        yield

    commits = Commits(2)
    commits.follow(0, begin=begin)
    commits.follow(1)
    commits.state[1] = "protected"
    assert all_done(commits) == [kind, SaveFailed]
    assert commits.told == []


def test_an_abandoned_shard_fails_the_others():
    commits = Commits(2)
    commits.follow(0)
    commits.abandon(1)
    commits.state[0] = "protected"
    assert all_done(commits) == [SaveFailed] * 2
    until(commits, commits.all_left)


def test_a_save_that_does_not_count_is_done_when_protected():
    commits = Commits(2, counted=False)
    commits.follow(0)
    commits.state[0] = "protected"
    assert all_done(commits) == [None]
    assert (commits.count, commits.told, commits.store.names()) == (0, [], set())


def test_who_is_told_of_the_end_may_fail_and_the_save_ends_nevertheless():
    def ended(error) -> Routine[None]:
        raise KeyError("a bug")
        yield

    commits = Commits(1)
    save = replace(commits.staged(0), ended=ended)
    commits.performers[0].begin(commits.protocols[0].see_through(save))
    commits.state[0] = "protected"
    until(commits, commits.all_left)
    assert commits.handles[0].committed
    assert "KeyError('a bug')" in commits.performers[0].log()[0]


# -- ranks and agents that die --------------------------------------------------------------------


def test_whoever_completes_the_count_may_die_before_waking_the_others():
    commits = Commits(3)
    running = [commits.follow(rank) for rank in (0, 1)]
    commits.state = ["protected"] * 3
    until(commits, lambda: commits.count == 2)
    commits.store.add(f"count/{GEN}", 1)  # and that was the last of rank 2
    until(commits, lambda: all(each.ended for each in running))
    assert commits.outcomes() == [None, None]
    assert sorted(commits.told_nodes()) == ["n0", "n1"]


def test_agents_without_ranks_are_told_in_equal_shares():
    commits = Commits(2, idle=5)
    commits.follow_all()
    commits.state = ["protected"] * 2
    until(commits, commits.all_left)
    assert sorted(commits.told_nodes()) == [f"n{at}" for at in range(7)]
    assert [len(each.calls(COMMIT)) for each in commits.performers] == [1 + 3, 1 + 2]


def test_an_idle_agent_that_cannot_be_told_stops_nobody_and_is_given_a_moment_the_next_time():
    commits = Commits(1, idle=2)
    commits.refuse["n1"] = GONE

    def patience(step: int) -> list[tuple[str, float]]:
        performer = commits.performers[0]
        performer.done.clear()
        commits.state[0] = "protected"
        commits.follow(0, generation(step=step))
        until(commits, commits.all_left)
        return [(each.node, each.patience_s) for each in performer.calls(COMMIT) if each.node]

    usual, glance = deadlines.COMMIT_S, deadlines.COMMIT_GLANCE_S
    assert patience(1) == [("n1", usual), ("n2", usual)]
    assert patience(2) == [("n1", glance), ("n2", usual)]
    assert "could not tell n1" in commits.performers[0].log()[0]
    commits.refuse.clear()
    assert patience(3) == [("n1", glance), ("n2", usual)]
    assert patience(4) == [("n1", usual), ("n2", usual)]


def test_an_agent_that_was_away_is_told_before_the_next_save_may_begin():
    commits = Commits(2)
    commits.refuse["n0"] = GONE
    commits.follow_all()
    commits.state = ["protected"] * 2
    assert all_done(commits) == [None, None]
    now_s = commits.performers[0].now_s
    until(commits, lambda: commits.performers[0].now_s > now_s + 2)
    assert not any(handle.left for handle in commits.handles.values())
    commits.refuse.clear()
    until(commits, commits.all_left)
    assert sorted(commits.told_nodes()) == ["n0", "n1"]


def test_a_completed_count_stays_complete_whatever_the_completer_meets():
    commits = Commits(3)
    commits.refuse = {f"n{rank}": GONE for rank in range(3)}
    commits.follow_all()
    commits.state = ["protected"] * 3
    assert all_done(commits) == [None] * 3
    until(commits, commits.all_left)
    assert commits.count == 3


def test_ranks_that_are_late_together_do_not_undo_a_complete_count():
    commits = Commits(4)
    running = [commits.follow(rank) for rank in range(3)]
    commits.state = ["protected"] * 4
    until(commits, lambda: commits.count == 3)
    commits.store.add(f"count/{GEN}", 1)
    for performer in commits.performers:
        performer.late_s = 100.0
    until(commits, lambda: all(each.ended for each in running))
    assert commits.outcomes() == [None] * 3


# -- deadlines ------------------------------------------------------------------------------------


def test_a_late_save_times_out_and_can_no_longer_be_committed():
    commits = Commits(2)
    late = commits.follow(0, timeout_s=0.1)
    until(commits, lambda: late.ended)
    assert "still encoding at its deadline" in str(commits.handles[0].error)
    commits.follow(1)
    commits.state = ["protected"] * 2
    assert all_done(commits) == [SaveTimedOut, SaveFailed]
    assert commits.count < 0
    assert commits.told == []


def test_a_protected_rank_whose_peers_are_late_takes_its_part_back():
    commits = Commits(2)
    commits.state = ["protected"] * 2
    early = commits.follow(0, timeout_s=0.2)
    until(commits, lambda: early.ended)
    assert "still protected at its deadline" in str(commits.handles[0].error)
    commits.follow(1)
    assert all_done(commits) == [SaveTimedOut, SaveFailed]
    assert commits.told == []


def test_a_program_that_ends_waits_a_second_for_others_to_leave():
    commits = Commits(2, timeout_s=60.0)
    commits.follow(0)
    commits.state = ["protected"] * 2
    until(commits, lambda: commits.count == 1)
    commits.store.add(f"count/{GEN}", 1)
    until(commits, lambda: commits.handles[0].done)
    ended_s = commits.performers[0].now_s
    commits.protocols[0].closing = True
    until(commits, commits.all_left)
    assert 0.9 < commits.performers[0].now_s - ended_s < 2


def test_looks_at_those_who_have_not_left_get_rarer():
    commits = Commits(2, timeout_s=60.0)
    commits.follow(0)
    commits.state = ["protected"] * 2
    until(commits, lambda: commits.count == 1)
    commits.store.add(f"count/{GEN}", 1)
    until(commits, commits.all_left)
    done = commits.performers[0].done
    waits = [each for each in done if not isinstance(each, CallAgent)]
    assert len(waits) < 3 * 60 / deadlines.LAST_LOOK_S + 100


# -- handle ---------------------------------------------------------------------------------------


def test_a_handle_tells_how_far_it_is():
    handle = SaveHandle(GEN, 10)
    assert repr(handle) == "<SaveHandle step 10: staging>"
    assert not any((handle.staged, handle.protected, handle.committed, handle.done))
    assert handle.wait(0.01) is False
    handle.mark_staged(1.0)
    assert (handle.staged, repr(handle)) == (True, "<SaveHandle step 10: staged>")
    handle.finish(SaveFailed("no room"), 2.0)
    assert (handle.done, handle.committed) == (True, False)
    assert repr(handle) == "<SaveHandle step 10: failed: no room>"
    with pytest.raises(SaveFailed, match="no room"):
        handle.wait()


def test_a_handle_tells_how_long_its_commit_took_after_the_snapshot():
    handle = SaveHandle(GEN, 10, began_s=1.0)
    handle.mark_staged(2.0)
    handle.finish(None, 5.0)
    assert (handle.committed_s, handle.committed) == (3.0, True)
