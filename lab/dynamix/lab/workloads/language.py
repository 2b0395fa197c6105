"""A small causal Transformer over bytes: it predicts every next byte of a text."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor, nn

VOCABULARY = 256
"""Every byte: no table of tokens has to be made of the data and kept with the model."""


class TransformerShape(NamedTuple):
    """Size of a Transformer."""

    num_tokens: int
    """Length of a sequence, in bytes."""
    width: int
    num_heads: int
    num_layers: int


class TransformerLayer(nn.Module):
    """Attention to earlier tokens, then two linear layers, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self._num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states N x tokens x width to the next ones."""
        hidden = hidden + self._attention(self.attention_norm(hidden))
        out: Tensor = hidden + self.mlp(hidden)
        return out

    def _attention(self, hidden: Tensor) -> Tensor:
        num_samples, num_tokens, width = hidden.shape
        shape = (num_samples, num_tokens, 3, self._num_heads, width // self._num_heads)  # no -1: there may be no sample
        heads = self.query_key_value(hidden).view(shape)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(num_samples, num_tokens, width))
        return out


class Transformer(nn.Module):
    """Bytes N x tokens (int64) to logits of the next byte, N x tokens x 256. No dropout: equal on all divisions."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.num_tokens, shape.width))
        self.layers = nn.Sequential(*(TransformerLayer(shape) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY)
        nn.init.normal_(self.tokens.weight, std=shape.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits; sequences may be shorter than the shape says."""
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(hidden)))
        return logits
