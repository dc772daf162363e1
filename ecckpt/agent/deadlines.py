"""Every wait of the agent, in seconds, with the reason for its length.

The core, the runtime and the storage of the agent read their waits here. Code refers to them as
``deadlines.NAME`` when it waits, so that a test can shorten one. docs/PROTOCOL.md lists those that
a peer can observe. Pure numbers.
"""

from __future__ import annotations

# -- requests from ranks and peers (runtime/request_deadline.py, service.py, daemon.py) -----------

# All of a request, body included. A request is at most 8 MiB, and most are a few hundred bytes. A
# connection that sends one byte a second must not keep one of the 64 server threads.
REQUEST_TIMEOUT_S = 5.0
# An answer may take as long as it needs, but the peer must take some bytes of it in this time.
ANSWER_IDLE_S = 10.0
# ``watch`` is answered after this time even without news: a rank that lives asks again, and a rank
# that died does not keep a server thread for longer.
WATCH_LIMIT_S = 30.0
# TCP_USER_TIMEOUT of accepted connections: sent bytes that a peer does not acknowledge for this
# long end the connection, also if the peer's host has vanished and never sends a reset.
PEER_ACK_TIMEOUT_S = 10.0
# gunicorn's arbiter kills a worker that has not reported for this long. Only a worker that hangs as
# a whole does not report: the report comes from its main thread, not from those that serve.
WORKER_HANG_S = 60
# How long a server that was told to stop lets running requests finish. What the agent holds
# outlives its process, so little is lost with a request that is cut off.
STOP_GRACE_S = 2

# -- requests to peers (runtime/network.py) -------------------------------------------------------

# ``hold``, ``held`` and ``prefetch`` are answered at once: the receiver only queues the work.
POST_TIMEOUT_S = 5.0
# ``probe`` is asked again in the next round, so one lost answer costs little.
PROBE_TIMEOUT_S = 2.0

# -- saves (core/protect.py) ----------------------------------------------------------------------

# Once ``min_fragments`` are held, slower holders get a multiple of the time that those took, and at
# least this. Tiny shards are held within milliseconds; the multiple of that would be no chance.
PROTECT_GRACE_LEAST_S = 1.0

# -- health and repair (core/health.py, core/repair.py) -------------------------------------------

# Time between two rounds of probes. Three missed probes make a node lost, so a loss is known after
# about 6 s, and an agent that is restarted in less is not taken for lost.
HEALTH_ROUND_S = 2.0
# Lost nodes are asked less often: each probe may occupy a thread for all of PROBE_TIMEOUT_S.
LOST_PEER_ROUND_S = 5.0
# Pause after a repair that left fragments missing. It doubles with each such repair up to the
# limit, so that a cause that persists (no memory at a peer) costs little.
REPAIR_RETRY_S = 4.0
REPAIR_RETRY_LIMIT_S = 64.0

# -- disk (core/scrub.py, runtime/service.py) -----------------------------------------------------

# Pause before the first round of scrubbing and between two rounds. A starting agent has more
# urgent reads, and a small tier would otherwise be read without a pause.
SCRUB_REST_S = 60.0
# How long the start of an agent waits for the scan of its disk. A scan that takes longer goes on
# in the background; until it ends, inventories name the disk as not read yet.
DISK_SCAN_PATIENCE_S = 5.0

# -- memory (storage/hugepages.py) ----------------------------------------------------------------

# Age of a region at which its pages are gathered into huge pages. By then the first save into the
# region is over and its fragments are on their way, so the move disturbs neither.
HUGE_PAGES_DELAY_S = 2.0

# A new agent waits so long for the lock of its folder. After SIGKILL the lock is free only when all
# threads have ended, which was up to 0.2 s after the process had become a zombie in 60 trials.
LOCK_PATIENCE_S, LOCK_LOOK_S = 1.0, 0.02

# How often an agent looks whether its lock and socket are still there: two calls of ``stat``. A new
# agent waits a little more than twice as long for the port of one that has lost its folder.
FOLDER_LOOK_S, PORT_PATIENCE_S = 1.0, 2.5
