"""``LocalCluster``: real agents on one machine, for tests of programs that use ecckpt."""

from ecckpt.testing.local_cluster import LocalCluster

__all__ = ["LocalCluster"]
