"""Reed-Solomon codes over GF(2^8), and CRC32C checksums.

The agent encodes and decodes shards with it; the client decodes shards that it reads remotely.
"""
