"""Mistakes of the caller, by name and at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ecckpt.client.arguments import step_of
from ecckpt.errors import InvalidConfig


@pytest.mark.parametrize("step", [7, np.int64(7), torch.tensor(7)])
def test_a_step_is_a_number_of_its_own(step: object) -> None:
    number = step_of(step, {})
    if isinstance(step, torch.Tensor):
        step += 1
    assert (type(number), number) == (int, 7)


@pytest.mark.parametrize(
    "step", [7.0, "7", None, True, torch.tensor(7.0), torch.tensor([7, 8]), np.float32(7), [7]]
)
def test_what_is_no_whole_number_is_refused(step: object) -> None:
    with pytest.raises(TypeError, match=r"not a whole number"):
        step_of(step, {})


@pytest.mark.parametrize("step", [-1, 10**18, 2**63, torch.tensor(-5)])
def test_what_is_out_of_range_is_refused(step: object) -> None:
    with pytest.raises(InvalidConfig, match=r"is not between 0 and 10\^18 - 1"):
        step_of(step, {})


def test_arguments_in_the_wrong_order_are_named() -> None:
    with pytest.raises(TypeError, match=r"the arguments are save\(step, state\)"):
        step_of({"model": 1}, 1)
