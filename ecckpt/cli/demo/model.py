"""The demo's model: a small pre-norm GPT on bytes, with one matrix for embedding and logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from ecckpt.cli.demo.corpus import VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Size:
    """The dimensions of a model; the defaults give 1.7 million parameters."""

    layers: int = 2
    heads: int = 8
    width: int = 256
    context: int = 64
    dropout: float = 0.1


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each with a layer norm before and a residual around."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        if size.width % size.heads:
            raise ValueError(f"width {size.width} is not a multiple of {size.heads} heads")
        self.heads = size.heads
        self.dropout = size.dropout
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.grow = nn.Linear(size.width, 4 * size.width)
        self.shrink = nn.Linear(4 * size.width, size.width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Map activations of shape [batch, time, width] to the same shape."""
        stream = stream + self._drop(self._attend(self.norm1(stream)))
        hidden = functional.gelu(self.grow(self.norm2(stream)))
        return stream + self._drop(self.shrink(hidden))

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        batch, time, width = stream.shape
        qkv = self.qkv(stream).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        projected: torch.Tensor = self.proj(mixed)
        return projected

    def _drop(self, stream: torch.Tensor) -> torch.Tensor:
        return functional.dropout(stream, self.dropout, self.training)


class Gpt(nn.Module):
    """A model that predicts the next byte; the embedding matrix also computes the logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dropout = size.dropout
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(TransformerBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.apply(_initialise)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats per byte; both arguments: int64 [batch, time]."""
        stream = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1]))
        stream = functional.dropout(stream, self.dropout, self.training)
        for block in self.blocks:
            stream = block(stream)
        # The weight is used directly, not through a second module that shares it. So the tensor has
        # one name: state dicts have no alias, and FSDP gathers it with the root's parameters.
        logits = functional.linear(self.norm(stream), self.bytes.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
