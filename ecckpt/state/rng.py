"""``RngState``: random number generators as one object of a state.

``state/load`` sets it after everything else, and reseeds it on another number of ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ecckpt.errors import StateMismatch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class RngState:
    """The global generators of Python, numpy, torch and each CUDA device, and further ones by name.

    Put it into the state that is saved and restored. A restore sets the generators last. Code
    between the restore and the first step may draw numbers (making a data loader's iterator does);
    call ``rewind`` after it. docs/EXACT_RESUME.md has an example.

    Args:
        generators: the program's own generators by name (a sampler's, an augmentation's), of torch,
            numpy (``Generator``, ``RandomState``) or Python. The program keeps ownership; a restore
            changes them in place.
        cuda: False leaves the CUDA generators out of saves and restores, for jobs that may restart
            with another number of visible devices.

    Raises:
        TypeError: something else is among the generators.
    """

    def __init__(
        self, generators: Mapping[str, Generator] | None = None, *, cuda: bool = True
    ) -> None:
        self._generators = dict(generators or {})
        for name, generator in self._generators.items():
            if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
                raise TypeError(
                    f"generator {name!r} is a {type(generator).__name__}, not one of torch, numpy "
                    "(Generator, RandomState) or Python (random.Random) with a state"
                )
        self._cuda = cuda
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator; tensors in it are copies."""
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
        """Return why ``load_state_dict(state)`` would fail, a text per part; empty if it would not.

        It changes no generator.
        """
        if not isinstance(state, dict):
            return ["not a state of random number generators"]
        problems = []
        for part, try_out in _TRIALS.items():
            if part not in state:
                problems.append(f"no {part} part was saved")
            else:
                problems += _failure(part, partial(try_out, state[part]))
        if self._cuda:
            problems += self._check_cuda(state.get("cuda"))
        return problems + self._check_generators(state.get("generators"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators.

        Raises ``StateMismatch``, before any generator is changed, if a part does not fit.
        """
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
        """Set all generators to their last restored states again; without a restore, do nothing.

        Call it once, after the iterators of the data loaders are made and before the first step. A
        second call does nothing, so that it cannot repeat random numbers during the training.
        """
        if self._restored is not None:
            self.load_state_dict(self._restored)
            self._restored = None

    def reseed(self, seed: bytes) -> None:
        """Seed each generator from its own digest (SHA-256) of ``seed`` and its name.

        A restore on another number of ranks calls it, because no saved state belongs to a rank of
        the new job.
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
            _seed_generator(generator, _digest(seed, f"generator {name}"))

    def go_on(self, state: dict[str, Any], seed: bytes, anew: Collection[str]) -> None:
        """Set the generators to ``state``, and seed those of ``anew`` as ``reseed`` does.

        A restore on another number of ranks calls it. A generator that was not saved, or whose
        state does not fit, is seeded, too.
        """
        self.reseed(seed)
        keep = {
            part
            for part, trial in _TRIALS.items()
            if part not in anew and not _failure(part, partial(trial, state[part]))
        }
        if "python" in keep:
            random.setstate(state["python"])
        if "numpy" in keep:
            np.random.set_state(state["numpy"])
        if "torch" in keep:
            torch.set_rng_state(state["torch"])
        cuda = {} if self._check_cuda(state["cuda"]) else dict(enumerate(state["cuda"]))
        for index, saved in cuda.items():
            if f"cuda {index}" not in anew:
                torch.cuda.set_rng_state(saved, index)
        for name, generator in self._generators.items():
            own = state["generators"].get(name)
            trial = partial(_try_generator, generator, own)
            if f"generator {name}" not in anew and not _failure(name, trial):
                _set_generator(generator, own)
        self._restored = self.state_dict()

    def _has_cuda(self) -> bool:
        return self._cuda and torch.cuda.is_available()

    def _check_cuda(self, saved: Any) -> list[str]:
        if not isinstance(saved, list):
            return ["no cuda part was saved"]
        here = torch.cuda.device_count() if self._has_cuda() else 0
        if len(saved) != here:
            way_out = "RngState(cuda=False) leaves them out"
            return [f"generators of {len(saved)} CUDA devices saved, {here} here ({way_out})"]
        current = torch.cuda.get_rng_state_all() if here else []
        return [
            f"cuda: the state saved for device {index} does not fit its generator"
            for index, (one, other) in enumerate(zip(saved, current, strict=True))
            if not _same_kind(one, other)
        ]

    def _check_generators(self, saved: Any) -> list[str]:
        if not isinstance(saved, dict):
            return ["no generators part was saved"]
        problems = [
            f"generator {name!r} was saved, but is not here"
            for name in saved.keys() - self._generators
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
    """Return a number of 63 bits: torch's ``manual_seed`` takes a signed 64-bit integer."""
    text = part.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(seed + b"\0" + text).digest()[:8], "little") >> 1


def _generator_state(generator: Generator) -> Any:
    match generator:
        case torch.Generator() | np.random.RandomState():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
    seeds = generator.bit_generator.seed_seq
    if type(seeds) is not np.random.SeedSequence:
        return {"bits": generator.bit_generator.state, "seeds": None}
    # `spawn` makes children of the seed sequence, and counts them there.
    entropy: Any = seeds.entropy
    return {
        "bits": generator.bit_generator.state,
        "seeds": {
            "entropy": entropy if entropy is None else np.asarray(entropy, object).tolist(),
            "spawn_key": [int(key) for key in seeds.spawn_key],
            "pool_size": seeds.pool_size,
            "n_children_spawned": seeds.n_children_spawned,
        },
    }


def _set_generator(generator: Generator, state: Any) -> None:
    match generator:
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case _:
            bits: Any = generator.bit_generator
            if state["seeds"] is not None:
                bits.__setstate__((state["bits"], np.random.SeedSequence(**state["seeds"])))
            bits.state = state["bits"]


def _seed_generator(generator: Generator, number: int) -> None:
    match generator:
        case torch.Generator():
            generator.manual_seed(number)
        case np.random.RandomState():
            generator.seed([number & 0xFFFFFFFF, number >> 32])
        case random.Random():
            generator.seed(number)
        case _:
            bits: Any = type(generator.bit_generator)
            fresh = bits(number)
            generator.bit_generator.__setstate__((fresh.state, fresh.seed_seq))  # type: ignore[attr-defined]


def _try_generator(generator: Generator, state: Any) -> None:
    """Set a new generator of the same class to ``state``, to see whether it raises."""
    match generator:
        case torch.Generator():
            if not _same_kind(state, generator.get_state()):
                raise ValueError("a state of another kind of generator")
            torch.Generator(generator.device).set_state(state)
        case np.random.RandomState():
            np.random.RandomState().set_state(state)
        case random.Random():
            random.Random().setstate(state)  # noqa: S311
        case _:
            other = np.random.Generator(type(generator.bit_generator)())
            _set_generator(other, state)


def _same_kind(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)


def _failure(part: str, trial: Callable[[], object]) -> list[str]:
    try:
        trial()
    except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        return [f"{part}: {error}"]
    return []


# Each sets a new generator to the state. A state that does not fit raises here, before any global
# generator has changed.
_TRIALS: dict[str, Callable[[Any], object]] = {
    "python": lambda state: random.Random().setstate(state),  # noqa: S311
    "numpy": lambda state: np.random.RandomState().set_state(state),
    "torch": lambda state: torch.Generator().set_state(state),
}
