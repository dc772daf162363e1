"""``refilled``: puts saved values into the existing containers of a live state.

``load.py`` uses it. Other references to such a container in the program see the restored values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

_DICTS = (dict, OrderedDict, defaultdict)


def refilled(live: Any, stored: Any) -> Any:
    """Return ``stored``, in the mutable containers of ``live`` where the types are equal.

    A dict, list, set, deque, bytearray or array stays the same object if the contents fit into it,
    at any depth below dicts and lists. Everything else is replaced by the saved value.
    """
    kind = type(live)
    if kind is not type(stored):
        return stored
    if kind in _DICTS:
        contents = [
            (key, refilled(live[key], value) if key in live else value)
            for key, value in stored.items()
        ]
        live.clear()
        live.update(contents)
        if kind is defaultdict:
            live.default_factory = stored.default_factory
        return live
    if kind is list:
        kept = len(live)
        live[:] = [
            refilled(live[index], value) if index < kept else value
            for index, value in enumerate(stored)
        ]
        return live
    refill = _REFILLS.get(kind)
    return live if refill is not None and refill(live, stored) else stored


def _set(live: set[Any], stored: set[Any]) -> bool:
    live.clear()
    live.update(stored)
    return True


def _counter(live: dict[Any, Any], stored: dict[Any, Any]) -> bool:
    live.clear()
    dict.update(live, stored)  # Counter.update() adds to the counts
    return True


def _deque(live: deque[Any], stored: deque[Any]) -> bool:
    if live.maxlen != stored.maxlen:
        return False
    live.clear()
    live.extend(stored)
    return True


def _bytes(live: bytearray, stored: bytearray) -> bool:
    try:
        live[:] = stored
    except BufferError:  # the length changes, but a memoryview holds the bytearray
        return False
    return True


def _array(live: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]) -> bool:
    if (live.dtype, live.shape) != (stored.dtype, stored.shape) or not live.flags.writeable:
        return False
    if 0 in live.strides and live.size > 1:  # broadcast: one element for many indices
        return False
    live[...] = stored
    return True


_REFILLS: dict[type, Callable[[Any, Any], bool]] = {
    set: _set,
    Counter: _counter,
    deque: _deque,
    bytearray: _bytes,
    np.ndarray: _array,
}
