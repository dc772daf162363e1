"""Pulls that run side by side, like runners: those who lag are not waited for."""

from __future__ import annotations

import threading
import time

# Those that are slower than others by that much are left, where others can be asked.
_LAG_LEAST_S = 2.0
_LAG_FACTOR = 3.0


class Field:
    """So many pulls; as many may be left behind as there are others to ask instead (``spare``).

    They are compared with those of the field that are done. Until one is, nobody is left, unless
    ``assumed_bytes_per_s`` says what others would do.
    """

    def __init__(self, running: int, spare: int, *, assumed_bytes_per_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._running, self._spare = running, spare
        self._assumed_bytes_per_s = assumed_bytes_per_s
        self._took_s, self._took_bytes = 0.0, 0

    def start(self, size_bytes: int, *, elsewhere: bool = False) -> Runner:
        """A pull begins; ``elsewhere``: there is another source of the same."""
        return Runner(self, size_bytes, elsewhere=elsewhere)

    def ended(self) -> None:
        """One of the pulls is done or given up, from whatever sources it came."""
        with self._lock:
            self._running -= 1

    def took(self, size_bytes: int, seconds: float) -> None:
        """What one needed that brought everything."""
        with self._lock:
            if seconds > self._took_s:
                self._took_s, self._took_bytes = seconds, size_bytes

    def patience_s(self, size_bytes: int, *, elsewhere: bool) -> float | None:
        """How long that much may take; None: whatever it takes."""
        with self._lock:
            if self._running > self._spare and not elsewhere:
                return None
            if self._took_s:
                others_s = self._took_s * max(1.0, size_bytes / self._took_bytes)
            elif self._assumed_bytes_per_s:
                others_s = size_bytes / self._assumed_bytes_per_s
            else:
                return None
        return max(_LAG_LEAST_S, _LAG_FACTOR * others_s)


class Runner:
    """One pull from one source, in the thread that made it."""

    def __init__(self, field: Field, size_bytes: int, *, elsewhere: bool) -> None:
        self._field, self._size_bytes = field, size_bytes
        self._elsewhere = elsewhere
        self._started_s = time.monotonic()

    def waits(self) -> bool:
        """Whether it is still waited for."""
        patience_s = self._field.patience_s(self._size_bytes, elsewhere=self._elsewhere)
        return patience_s is None or time.monotonic() - self._started_s < patience_s

    def arrived(self) -> None:
        """It has brought everything: a measure for the others."""
        self._field.took(self._size_bytes, time.monotonic() - self._started_s)
