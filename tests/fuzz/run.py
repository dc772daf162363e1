"""Fuzz one parser with atheris: ``python -m tests.fuzz.run TARGET [libFuzzer options]``.

    python -m tests.fuzz.run message -max_total_time=300

What reaches new code is kept in ``tests/fuzz/found/TARGET`` (not in the repository); a crash is
written to ``crash-*`` there. Copy what is worth it to ``tests/fuzz/corpus/TARGET``: the tests
replay it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import atheris

from ecckpt.errors import EcckptError
from tests.fuzz.targets import CORPUS, TARGETS, seeds

LIMITS = ["-max_len=20000", "-timeout=10", "-rss_limit_mb=2000", "-malloc_limit_mb=300"]


def instrument() -> None:
    """Make all parsers tell which branches they take, however they were installed."""
    modules = [each for name, each in sys.modules.items() if name.split(".")[0] == "ecckpt"]
    found = {id(each): each for module in modules for each in functions(module, module.__name__)}
    for each in found.values():
        atheris.instrument_func(each)


def functions(holder: Any, module: str) -> Iterator[types.FunctionType]:
    """The functions of a module and of its classes."""
    for each in vars(holder).values():
        inner = getattr(each, "__func__", None) or getattr(each, "fget", None) or each
        if isinstance(inner, types.FunctionType) and inner.__module__ == module:
            yield inner
        elif isinstance(inner, type) and inner.__module__ == module:
            yield from functions(inner, module)


def main() -> None:
    instrument()
    name, *options = sys.argv[1:]
    found = CORPUS.parent / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (found / f"seed-{number}").write_bytes(seed)
    target = TARGETS[name]

    def act(data: bytes) -> None:
        with suppress(EcckptError):
            target(data)

    prefix = f"-artifact_prefix={found}/"
    atheris.Setup([sys.argv[0], *LIMITS, prefix, *options, str(found)], act)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
