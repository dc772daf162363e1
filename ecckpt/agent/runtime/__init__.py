"""The daemon that performs what the core decides: files, network, HTTP, threads."""
