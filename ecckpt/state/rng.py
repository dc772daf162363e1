"""Random number generators as one object of a state."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ecckpt.errors import StateMismatch

Generator = torch.Generator | np.random.Generator


class RngState:
    """The generators of Python, numpy and torch, every CUDA device, and any given by name.

    ``generators`` are the training's own (a sampler's, an augmentation's). ``cuda=False`` leaves
    the CUDA generators out of what is saved and of what is restored, for jobs that may restart with
    another number of visible devices.

    A restore sets the generators last. What the program does between that and its first step may
    draw again (making a data loader's iterator does); ``rewind`` undoes it.
    """

    def __init__(
        self, generators: Mapping[str, Generator] | None = None, *, cuda: bool = True
    ) -> None:
        self._generators = dict(generators or {})
        self._cuda = cuda
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Every generator's state, by part."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if self._has_cuda() else [],
            "generators": {
                name: _generator_state(generator) for name, generator in self._generators.items()
            },
        }

    def check_state_dict(self, state: Any) -> list[str]:
        """Why ``load_state_dict(state)`` would fail, part by part; changes no generator."""
        if not isinstance(state, dict):
            return ["no state of random number generators"]
        problems = []
        for part, try_out in _TRIALS.items():
            if part not in state:
                problems.append(f"no {part} part saved")
            else:
                problems += _failure(part, partial(try_out, state[part]))
        if self._cuda:
            problems += self._check_cuda(state.get("cuda"))
        return problems + self._check_generators(state.get("generators"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator; raises ``StateMismatch`` before the first if any part is unfit."""
        problems = self.check_state_dict(state)
        if problems:
            raise StateMismatch(problems)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if self._has_cuda():
            torch.cuda.set_rng_state_all(state["cuda"])
        for name, generator in self._generators.items():
            _set_generator(generator, state["generators"][name])
        self._restored = state

    def rewind(self) -> None:
        """Set every generator again as it was last restored; does nothing if none was.

        Once, after the iterators of the data loaders are made and before the first step.
        """
        if self._restored is not None:
            self.load_state_dict(self._restored)
            self._restored = None

    def reseed(self, seed: bytes) -> None:
        """Seed every generator, each from its own digest of ``seed``.

        What a restore on another number of ranks does: no saved state belongs to a new rank.
        """
        random.seed(_digest(seed, "python"))
        numbers = _digest(seed, "numpy")
        np.random.seed([numbers & 0xFFFFFFFF, numbers >> 32])
        torch.default_generator.manual_seed(_digest(seed, "torch"))
        if self._has_cuda():
            for index in range(torch.cuda.device_count()):
                with torch.cuda.device(index):
                    torch.cuda.manual_seed(_digest(seed, f"cuda {index}"))
        for name, generator in self._generators.items():
            number = _digest(seed, f"generator {name}")
            if isinstance(generator, torch.Generator):
                generator.manual_seed(number)
            else:
                bits: Any = type(generator.bit_generator)
                generator.bit_generator.state = bits(number).state

    def _has_cuda(self) -> bool:
        return self._cuda and torch.cuda.is_available()

    def _check_cuda(self, saved: Any) -> list[str]:
        if not isinstance(saved, list):
            return ["no cuda part saved"]
        here = torch.cuda.device_count() if self._has_cuda() else 0
        if len(saved) != here:
            way_out = "RngState(cuda=False) leaves them out"
            return [f"generators of {len(saved)} CUDA devices saved, {here} here ({way_out})"]
        current = torch.cuda.get_rng_state_all() if here else []
        return [
            f"cuda: the state saved for device {index} is none of its generator"
            for index, (one, other) in enumerate(zip(saved, current, strict=True))
            if not _same_kind(one, other)
        ]

    def _check_generators(self, saved: Any) -> list[str]:
        if not isinstance(saved, dict):
            return ["no generators part saved"]
        problems = [
            f"generator {name!r} saved, but not here" for name in saved.keys() - self._generators
        ]
        for name, generator in self._generators.items():
            if name not in saved:
                problems.append(f"generator {name!r} was not saved")
            else:
                problems += _failure(
                    f"generator {name!r}",
                    partial(_try_generator, generator, saved[name]),
                )
        return problems


def _digest(seed: bytes, part: str) -> int:
    """A number of 63 bits."""
    text = part.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(seed + b"\0" + text).digest()[:8], "little") >> 1


def _generator_state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state


def _set_generator(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _try_generator(generator: Generator, state: Any) -> None:
    """Set a generator of the same kind, made for that."""
    if isinstance(generator, torch.Generator):
        if not _same_kind(state, generator.get_state()):
            raise ValueError("a state of another kind")
        torch.Generator(generator.device).set_state(state)
    else:
        type(generator.bit_generator)().state = state


def _same_kind(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)


def _failure(part: str, trial: Callable[[], object]) -> list[str]:
    try:
        trial()
    except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        return [f"{part}: {error}"]
    return []


# Each sets a generator of its own, so that what is refused is refused before anything is set.
_TRIALS: dict[str, Callable[[Any], object]] = {
    "python": lambda state: random.Random().setstate(state),  # noqa: S311
    "numpy": lambda state: np.random.RandomState().set_state(state),
    "torch": lambda state: torch.Generator().set_state(state),
}
