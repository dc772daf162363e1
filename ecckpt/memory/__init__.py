"""Bytes in memory: the native module, views and copies of buffers, mapped files."""
