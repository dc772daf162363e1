"""Identities, and the bytes of fragment files (docs/FORMAT.md). Pure."""
