"""The protocol between ranks and agents: messages, verbs, HTTP, pulls (docs/PROTOCOL.md)."""
