"""Models for images, and a small causal Transformer over bytes. None has BatchNorm.

Batch statistics of a rank's own samples make the gradient depend on how a batch is divided (measured: 18 % relative
error with 2 / 40 / 64 / 16 samples), and statistics over all ranks cost a collective per layer. VGG11 has no norm, as
published; the ResNet has GroupNorm instead, which sees one sample only, with 16 channels in a group (Wu and He, 2018,
table 3). Both begin with the weights of He et al., 2015. With PyTorch's own, VGG11 stays at a loss of ln 10
for 160 steps of SGD at least (2.05 after 60 with these), and the ResNet is at 2.26 instead of 2.08 after 80.
"""

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
            layers.insert(-1, nn.MaxPool2d(2))  # ReLU of a maximum is the same as that of all four
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
        shortcut = inputs
        if self._stride > 1 or self._new_channels:
            half = self._new_channels // 2
            strided = inputs[:, :, :: self._stride, :: self._stride]
            shortcut = F.pad(strided, (0, 0, 0, 0, half, self._new_channels - half))
        return torch.relu(self.norm2(self.convolution2(hidden)) + shortcut)


def resnet20() -> nn.Sequential:
    """ResNet-20 for 32 x 32 of He et al., 2016, section 4.2; 0.27 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), _norm(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for block in range(3):
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
    model.register_forward_pre_hook(_channels_last)
    return model


def _channels_last(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """On a CPU core an eighth faster, from 32 images on."""
    return inputs[0].contiguous(memory_format=torch.channels_last)


class TransformerLayer(nn.Module):
    """Attention to earlier tokens, then two linear layers, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states N x tokens x width to the next ones."""
        num_samples, num_tokens, width = hidden.shape
        shape = (num_samples, num_tokens, 3, self._num_heads, width // self._num_heads)  # no -1: there may be no sample
        heads = self.query_key_value(self.attention_norm(hidden)).view(shape)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(hidden.shape))
        out: Tensor = hidden + self.mlp(hidden)
        return out


class Transformer(nn.Module):
    """Bytes N x tokens (int64) to logits of the next byte, N x tokens x 256. No dropout: equal on all divisions."""

    def __init__(self, num_tokens: int, *, width: int, num_heads: int, num_layers: int) -> None:
        """Make a model for sequences of at most `num_tokens` bytes."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(num_tokens, width))
        self.layers = nn.Sequential(*(TransformerLayer(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next byte."""
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(hidden)))
        return logits


ROW_STD = 0.3
"""Standard deviation of a new row's numbers, after the gain."""


class NeuralCollaborativeFiltering(nn.Module):
    """User and items, N x (1 + candidates) (int64), to logits N x candidates: NeuMF of He et al., 2017, section 3.4.

    A generalised matrix factorisation and a perceptron, each with tables of its own, joined by a last layer.
    """

    def __init__(self, num_users: int, num_items: int, *, width: int, gain: float) -> None:
        """`width` numbers in a row of each of the four tables."""
        super().__init__()
        self._gain = gain
        self.user_factors, self.item_factors = _table(num_users, width, gain), _table(num_items, width, gain)
        self.user_features, self.item_features = _table(num_users, width, gain), _table(num_items, width, gain)
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


class RecurrentLanguageModel(nn.Module):
    """Words and candidates, N x (tokens + candidates) (int64), to logits of the next word, N x tokens x candidates.

    One LSTM layer between a table of the words that are read and another, not tied to it, of those that may follow. The
    gradient of the first is zero in all rows but those of the words read, of the second in all but the candidates'.
    """

    def __init__(self, num_words: int, num_tokens: int, *, width: int, num_hidden: int, gain: float) -> None:
        """Inputs are `num_tokens` words, behind which their candidates follow; `width` numbers in a row of a table."""
        super().__init__()
        self._num_tokens, self._gain = num_tokens, gain
        self.input_table, self.output_table = _table(num_words, width, gain), _table(num_words, width, gain)
        self.lstm = nn.LSTM(width, num_hidden, batch_first=True)
        self.projection = nn.Linear(num_hidden, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits among each sequence's own candidates."""
        words, candidates = inputs[:, : self._num_tokens], inputs[:, self._num_tokens :]
        hidden, _ = self.lstm(self.input_table(words) * self._gain)
        return torch.bmm(self.projection(hidden), self.output_table(candidates).transpose(1, 2)) * self._gain


def _table(num_rows: int, width: int, gain: float) -> nn.Embedding:
    table = nn.Embedding(num_rows, width)
    nn.init.normal_(table.weight, std=ROW_STD / gain)
    return table
