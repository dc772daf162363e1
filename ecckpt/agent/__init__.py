"""The node agent: one daemon that owns checkpoint memory on its node. Never imports torch."""
