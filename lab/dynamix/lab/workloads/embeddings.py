"""Models whose parameters are mostly embedding tables, so that a gradient is zero in most rows: NCF and an LSTM.

Every table is an `nn.Embedding`, whose gradient is dense with rows of zeros; with `sparse = True` set on these modules
before training it is one of torch's sparse tensors. Rows are multiplied by a `gain` and begin as much smaller: a rank's
batch adds to a row what few of its samples say, divided by all, and without the gain a row of a rare word would need a
learning rate that the dense layers do not bear.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

ROW_STD = 0.3
"""Standard deviation of a new row's numbers, after the gain."""


class FilteringShape(NamedTuple):
    """Size of a neural collaborative filter."""

    num_users: int
    num_items: int
    width: int
    """Numbers in a row of each of the four tables."""
    gain: float


class NeuralCollaborativeFiltering(nn.Module):
    """User and items, N x (1 + candidates) (int64), to logits N x candidates: NeuMF of He et al., 2017, section 3.4.

    A generalised matrix factorisation and a perceptron, each with tables of its own, joined by a last layer.
    """

    def __init__(self, shape: FilteringShape) -> None:
        super().__init__()
        width, self._gain = shape.width, shape.gain
        self.user_factors = _table(shape.num_users, width, shape.gain)
        self.item_factors = _table(shape.num_items, width, shape.gain)
        self.user_features = _table(shape.num_users, width, shape.gain)
        self.item_features = _table(shape.num_items, width, shape.gain)
        self.mlp = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU())
        self.head = nn.Linear(width + width // 2, 1)
        with torch.no_grad():
            self.head.weight[:, :width] = 1.0  # begins with the plain product of user and item

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits: how much the user likes each item."""
        user, items = inputs[:, :1], inputs[:, 1:]
        product = self.user_factors(user) * self.item_factors(items) * self._gain**2
        of_user = self.user_features(user).expand(-1, items.shape[1], -1)
        features = self.mlp(torch.cat([of_user, self.item_features(items)], 2) * self._gain)
        logits: Tensor = self.head(torch.cat([product, features], 2))
        return logits.squeeze(2)


class RecurrentShape(NamedTuple):
    """Size of an LSTM language model."""

    num_words: int
    num_tokens: int
    """Words of an input; its candidates follow."""
    width: int
    """Numbers in a row of both tables."""
    num_hidden: int
    gain: float


class RecurrentLanguageModel(nn.Module):
    """Words and candidates, N x (tokens + candidates) (int64), to logits of the next word, N x tokens x candidates.

    One LSTM layer between a table of the words that are read and another, not tied to it, of those that may follow. The
    gradient of the first is zero in all rows but those of the words read, of the second in all but the candidates'.
    """

    def __init__(self, shape: RecurrentShape) -> None:
        super().__init__()
        self._num_tokens, self._gain = shape.num_tokens, shape.gain
        self.input_table = _table(shape.num_words, shape.width, shape.gain)
        self.output_table = _table(shape.num_words, shape.width, shape.gain)
        self.lstm = nn.LSTM(shape.width, shape.num_hidden, batch_first=True)
        self.projection = nn.Linear(shape.num_hidden, shape.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits among each sequence's own candidates."""
        words, candidates = inputs[:, : self._num_tokens], inputs[:, self._num_tokens :]
        hidden, _ = self.lstm(self.input_table(words) * self._gain)
        return torch.bmm(self.projection(hidden), self.output_table(candidates).transpose(1, 2)) * self._gain


def _table(num_rows: int, width: int, gain: float) -> nn.Embedding:
    table = nn.Embedding(num_rows, width)
    nn.init.normal_(table.weight, std=ROW_STD / gain)
    return table
