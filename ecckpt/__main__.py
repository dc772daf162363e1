"""``python -m ecckpt`` is the ``ecckpt`` command."""

from ecckpt.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
