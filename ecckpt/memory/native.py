"""The native module, if it could be built, and which engine "auto" stands for in this process."""

from __future__ import annotations

from ecckpt.errors import InvalidCode

try:
    from ecckpt.memory import _native

    HAVE_NATIVE = True
except ImportError:  # installed without a compiler
    HAVE_NATIVE = False

AUTO = "auto"


def engines() -> tuple[str, ...]:
    """Return the names of the engines usable here, best first; "zfec" is always the last."""
    return (*_native.engine_names(), "zfec") if HAVE_NATIVE else ("zfec",)


def resolved(engine: str) -> str:
    """Return the name of a usable engine: the one named, or what "auto" stands for.

    Raises:
        InvalidCode: that engine is not usable here.
    """
    usable = engines()
    name = _Process.engine if engine == AUTO else engine
    if name == AUTO:
        return usable[0]
    if name not in usable:
        raise InvalidCode(
            f"engine {name!r} is not usable here", hint=f"auto, {', '.join(usable)} are"
        )
    return name


def prefer(engine: str) -> None:
    """Make "auto" stand for that engine in this process ("auto": for the best one, as at first).

    For the start of a program, with what its configuration says; ``config.py`` reads the
    environment. Codecs that exist keep theirs.

    Raises:
        InvalidCode: that engine is not usable here.
    """
    _Process.engine = AUTO if engine == AUTO else resolved(engine)


class _Process:
    engine = AUTO
