"""Every wait of a client of an agent, in seconds, with the reason for its length.

Used by http.py and agent_client.py, and so by ranks, tools and agents that call other agents.
docs/PROTOCOL.md lists them. Pure numbers.
"""

from __future__ import annotations

# A whole call, unless the caller or the verb says otherwise (protocol/verbs.py). Agents answer
# most calls within milliseconds. The kernel sends a lost SYN again after 1, 3 and 7 s: ten seconds
# outlast all three, and the restart of an agent.
CALL_TIMEOUT_S = 10.0
# The longest pause within an answer, and the longest that sent bytes stay unacknowledged. An agent
# sends without a pause, so a longer one means that its host or the network is gone.
IDLE_TIMEOUT_S = 10.0
