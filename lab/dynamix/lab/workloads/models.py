"""Models for images, and a small causal Transformer over bytes. None has BatchNorm.

Batch statistics of a rank's own samples make the gradient depend on how a batch is divided (measured: 18 % relative
error with 2 / 40 / 64 / 16 samples), and statistics over all ranks cost a collective per layer. VGG11 has no norm, as
published; the ResNet has GroupNorm instead, which sees one sample only, with 16 channels in a group (Wu and He, 2018,
table 3). Both begin with the weights of He et al., 2015. With PyTorch's own, VGG11 stays at a loss of ln 10
for 160 steps of SGD at least (2.05 after 60 with these), and the ResNet is at 2.26 instead of 2.08 after 80.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor, nn

VOCABULARY = 256
"""Every byte: no table of tokens has to be made of the data and kept with the model."""
CHANNELS_PER_GROUP = 16
NUM_CLASSES = 10
LAST_LAYER_STD = 0.01
VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
"""Channels of the convolutions of configuration A, and where a maximum halves the image (Simonyan, Zisserman, 2015)."""


def mlp(num_pixels: int, num_hidden: int) -> nn.Sequential:
    """One hidden layer: flatten, linear, ReLU, linear."""
    return nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, num_hidden), nn.ReLU(), nn.Linear(num_hidden, NUM_CLASSES))


def small_cnn(side: int, channels: int) -> nn.Sequential:
    """Two convolutions, of `channels` and twice as many, and two linear layers, for grey images of `side` x `side`.

    11,178 parameters for 14 x 14 and 8 channels, 105,866 for 28 x 28 and 16.
    """
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CLASSES),
    )


def vgg11() -> nn.Sequential:
    """VGG11 for 32 x 32: eight convolutions, one linear layer; 9.2 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG11:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return _initialised(nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, NUM_CLASSES)))


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut without parameters (He et al., 2016, option A)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(width)
        self.convolution2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = _norm(width)
        self._stride = stride
        self._new_channels = width - channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Images N x channels x side x side; the side shrinks by the stride, the channels grow to `width`."""
        hidden = torch.relu(self.norm1(self.convolution1(inputs)))
        return torch.relu(self.norm2(self.convolution2(hidden)) + self._shortcut(inputs))

    def _shortcut(self, inputs: Tensor) -> Tensor:
        if self._stride == 1 and self._new_channels == 0:
            return inputs
        half = self._new_channels // 2
        return F.pad(inputs[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, half, self._new_channels - half))


def resnet(depth: int) -> nn.Sequential:
    """ResNet for 32 x 32 of He et al., 2016, section 4.2; depth 20 has 0.27 million parameters.

    Raises:
        ValueError: when the depth is not 6 n + 2.
    """
    num_blocks, rest = divmod(depth - 2, 6)
    if rest or num_blocks < 1:
        raise ValueError(f"depth={depth}: a ResNet for CIFAR has 6 n + 2 layers, 8, 14, 20, 26, 32 ...")
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), _norm(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for block in range(num_blocks):
            layers.append(ResidualBlock(channels, width, stride=2 if block == 0 and width > channels else 1))
            channels = width
    return _initialised(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES)))


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels)


def _initialised(model: nn.Sequential) -> nn.Sequential:
    """Convolutions that keep the variance of gradients through ReLU; a last layer that begins undecided."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=LAST_LAYER_STD)
            nn.init.zeros_(layer.bias)
    return model


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
