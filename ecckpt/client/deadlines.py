"""How long the client waits for what, and why so long. All in seconds.

docs/RELIABILITY.md lists every wait of the system.
"""

from __future__ import annotations

# A plain request, from connecting to the last byte: an agent that is busy answers well within it.
CALL_S = 10.0
# A sign of life: an agent that is at work answers in milliseconds.
PING_S = 2.0
# The same for an agent that did not answer last time: a training program must not wait for it.
GLANCE_S = 0.05

# -- joining a run --------------------------------------------------------------------------------
# Starting an agent: importing its packages takes seconds on a busy machine.
START_AGENT_S, START_LOOK_S = 30.0, 0.02
# Stopping it: requests that run may take some seconds more.
STOP_AGENT_S = 10.0
# The session, which rank 0 writes at once; ranks may start a minute apart.
SESSION_S = 60.0
# Each rank finds or starts its agent before it joins, and hosts differ.
JOIN_S = 120.0
# What agents get to finish reading their disks where none of them knows the run yet.
DISKS_AT_JOIN_S = 60.0
# After its deadline rank 0 writes which ranks were late; the others wait so long for that.
LATE_RANKS_S = 5.0
# Between two looks at a store that cannot be cloned.
STORE_LOOK_S = 0.05
# A store whose connection broke is reached within so long, or taken for gone until the next call.
STORE_CONNECT_S = 1.0
# torch rounds its time-outs to milliseconds, and takes 0 for no time-out.
STORE_WAIT_LEAST_S = 0.002

# -- a save ---------------------------------------------------------------------------------------
# After so long without an answer the agent is asked for a first sign of life, then for others.
FIRST_PING_AFTER_S, LATER_PINGS_AFTER_S = 0.25, 2.0
# Between two attempts to start this node's agent again.
REVIVE_AGAIN_S = 1.0
# One look at a shard's progress; the agent answers at once when there is news.
WATCH_S = 1.0
# One wait in torch's store, which prints a warning whenever it waits in vain.
STORE_WAIT_S = 10.0
# Before the store is asked again whether a save is committed. No save begins meanwhile.
ASK_STORE_AGAIN_S = 1.0
# Before an agent that is away is told of a commit again.
TELL_AGAIN_S = 0.25
# Telling a node without ranks of a commit: it learns of it from the next one, too.
COMMIT_S = 2.0
# The same for a node that was deaf to the last one: it must not keep saves from ending.
COMMIT_GLANCE_S = 0.1
# Ranks leave a save within milliseconds of each other, so they look often at first. All ranks
# together look at most so many times a second, which their store takes easily.
FIRST_LOOK_S, LAST_LOOK_S, LOOKS_PER_S = 1e-3, 0.05, 20_000
# A program that ends waits so long for other ranks to leave its last save.
LEAVE_S = 1.0
# Another rank's checksums of replicated tensors, which it puts right after its digest.
CLAIM_S, CLAIM_LOOK_S = 10.0, 0.05
# Spans for `ecckpt trace`: if they are lost, only a look is missing.
SPANS_S = 2.0
# Asking this node's agent to guard what it keeps: it is asked again after the next save.
GUARD_S = 2.0

# -- disks ----------------------------------------------------------------------------------------
# Asking one agent how far its disk is.
ARCHIVE_S = 2.0
# Between two rounds of asking: a fifth of the time taken so far, within these bounds.
ROUND_LEAST_S, ROUND_MOST_S = 0.05, 1.0
# The same once the client is closing.
ROUND_CLOSING_S = 0.05
# Once enough is on disk, slower disks get three times what the others took, at least so long.
DISK_GRACE_S, DISK_GRACE_FACTOR = 5.0, 3.0
# A generation of which nothing new reached any disk for so long is given up.
DISK_PATIENCE_S = 60.0

# -- a restore ------------------------------------------------------------------------------------
# This node's agent tells its newest timeline: only a guess that saves rank 0 a round.
KNOWN_TIMELINE_S = 1.0
# A start that begins its timeline this long after it came to join asks first whether it may.
BEGINS_AT_ONCE_S = 1.0
# Between two looks whether this node's agent is back.
AGENT_LOOK_S = 0.1
# Of each wait between ranks, one peer that hangs may use up a quarter, and no more than this.
PEER_MOST_S, PEER_SHARE = 10.0, 0.25
# Of the same wait, what agents get to finish reading their disks: a large one takes up to a minute
# after a loss of power. Between two looks at them.
DISKS_SHARE, DISKS_LOOK_S = 0.4, 0.5
# Of the same wait, what bringing a shard may take: the rest is for the ranks to agree.
BRING_SHARE = 0.8


def peer_patience_s(restore_timeout_s: float) -> float:
    """How long one agent may take to answer in a restore."""
    return min(PEER_MOST_S, PEER_SHARE * restore_timeout_s)
