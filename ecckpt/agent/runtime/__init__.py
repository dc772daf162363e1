"""The agent's daemon, which performs the decisions: files, network, HTTP, threads."""
