"""Whether the native module is installed, and the engine that "auto" selects in this process.

``buffers``, ``coding`` and the agent's start-up (``cli/agent.py``) use it.
"""

from __future__ import annotations

from ecckpt.errors import InvalidCode

try:
    from ecckpt.memory import _native

    HAVE_NATIVE = True
except ImportError:  # installed without a compiler
    HAVE_NATIVE = False

AUTO = "auto"


def engines() -> tuple[str, ...]:
    """Return the names of the engines that run on this CPU, fastest first; "zfec" is the last."""
    return (*_native.engine_names(), "zfec") if HAVE_NATIVE else ("zfec",)


def resolved(engine: str) -> str:
    """Return the name of a usable engine; "auto" becomes the one that the process prefers.

    Raises:
        InvalidCode: this machine cannot run that engine.
    """
    usable = engines()
    name = _Process.engine if engine == AUTO else engine
    if name == AUTO:
        return usable[0]
    if name not in usable:
        raise InvalidCode(
            f"engine {name!r} is not usable here", hint=f"use one of auto, {', '.join(usable)}"
        )
    return name


def prefer(engine: str) -> None:
    """Set the engine that "auto" selects in this process; "auto" resets it to the fastest one.

    A program calls it once, when it starts, with the engine from its configuration
    (``client/config.py`` reads the environment). Codecs that exist already keep their engine.

    Raises:
        InvalidCode: this machine cannot run that engine.
    """
    _Process.engine = AUTO if engine == AUTO else resolved(engine)


class _Process:  # a class, so that `prefer` can set the process-wide choice without `global`
    engine = AUTO
