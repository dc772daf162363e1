"""Loading a shard into a live state: everything is checked first, then all or nothing is loaded."""
