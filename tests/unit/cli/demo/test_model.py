"""The demo's corpus, batches and model, in one process."""

from __future__ import annotations

import pytest
import torch

from ecckpt.cli.demo.corpus import Batches, corpus
from ecckpt.cli.demo.model import Gpt, Size

SMALL = Size(layers=2, heads=2, width=32, context=16)


@pytest.fixture(scope="module")
def tokens():
    return corpus(limit_bytes=1 << 18)


@pytest.fixture
def model():
    torch.manual_seed(7)
    return Gpt(SMALL)


def batches(tokens, *, rank=0, seed=1):
    return Batches(tokens, batch=8, context=SMALL.context, seed=seed, rank=rank)


def test_corpus_is_the_same_every_time_and_capped(tokens):
    assert tokens.dtype == torch.uint8
    assert len(tokens) == 1 << 18
    assert torch.equal(tokens, corpus(limit_bytes=1 << 18))


def test_corpus_joins_files_by_name_and_skips_unreadable_ones(tmp_path):
    (tmp_path / "b.py").write_bytes(b"second")
    (tmp_path / "a.py").write_bytes(b"first")
    (tmp_path / "aa.py").mkdir()  # matches the pattern and cannot be read
    (tmp_path / "c.txt").write_bytes(b"no source")
    assert bytes(corpus(tmp_path).tolist()) == b"firstsecond"


def test_corpus_without_sources_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="to train on"):
        corpus(tmp_path)


def test_targets_are_the_inputs_one_token_later(tokens):
    inputs, targets = batches(tokens).draw()
    assert inputs.shape == targets.shape == (8, SMALL.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_every_window_can_be_drawn():
    tiny = torch.arange(18, dtype=torch.uint8)
    source = Batches(tiny, batch=64, context=16, seed=0, rank=0)
    assert set(source.draw()[0][:, 0].tolist()) == {0, 1}


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="too few"):
        Batches(torch.zeros(16, dtype=torch.uint8), batch=1, context=16, seed=0, rank=0)


def test_batches_resume_with_exactly_the_next_one(tokens):
    source = batches(tokens)
    for _ in range(3):
        source.draw()
    state = source.state_dict()
    expected = [source.draw() for _ in range(4)]

    resumed = batches(tokens, seed=99)
    resumed.load_state_dict(state)
    assert resumed.drawn == 3
    for inputs, targets in expected:
        again = resumed.draw()
        assert torch.equal(again[0], inputs)
        assert torch.equal(again[1], targets)


def test_ranks_and_seeds_draw_different_batches(tokens):
    drawn = [batches(tokens, rank=rank).draw()[0] for rank in range(6)]
    drawn.append(batches(tokens, seed=2).draw()[0])
    assert len({tuple(inputs.flatten().tolist()) for inputs in drawn}) == 7


def test_batches_leave_the_global_generator_alone(tokens):
    before = torch.get_rng_state()
    batches(tokens).draw()
    assert torch.equal(torch.get_rng_state(), before)


def test_loss_decreases(tokens, model):
    source = batches(tokens)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(*source.draw())
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0


def test_dropout_makes_the_loss_depend_on_the_random_state(tokens, model):
    inputs, targets = batches(tokens).draw()
    state = torch.get_rng_state()
    first, second = model(inputs, targets), model(inputs, targets)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(model(inputs, targets), first)
    model.eval()
    assert torch.equal(model(inputs, targets), model(inputs, targets))


def test_the_future_is_masked(tokens, model):
    model.eval()
    inputs, targets = batches(tokens).draw()
    changed = inputs.clone()
    changed[:, -1] = 0
    targets[:, -1] = -100  # cross_entropy ignores it: only the last place may see the change
    assert torch.equal(model(inputs, targets), model(changed, targets))


def test_one_name_per_tensor_and_the_default_size():
    state = Gpt(Size()).state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    assert 1_000_000 < sum(tensor.numel() for tensor in state.values()) < 3_000_000


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple"):
        Gpt(Size(heads=5))
