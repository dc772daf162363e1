"""The tests; ``tests/unit`` mirrors the package."""
