"""Reed-Solomon codes over GF(2^8), and CRC32C."""
