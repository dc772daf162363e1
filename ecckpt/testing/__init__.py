"""A cluster on one machine, for tests."""

from ecckpt.testing.local_cluster import LocalCluster

__all__ = ["LocalCluster"]
