"""Data made from a fixed seed, without files: choices of users among items, and a text of numbered words.

Popularity follows Zipf's law: the j-th most frequent of n has a probability proportional to j ** -exponent, so that a
batch touches few rows of an embedding table: frequent ones in every step, rare ones now and then. Every run sees the
same data, as with a published data set; a job's seed has no part in it.

A sample carries its own negatives: the item chosen stands among others that were offered with it, the next word of a
text among others that were drawn for the sequence. So a gradient depends on the samples of the batch only, not on how
they were divided over ranks, and touches only rows that its samples name. These are the sampled softmax of Jean et
al., 2015, and the sampled binary cross entropy of He et al., 2017, with the drawing moved into the data.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

Integers = npt.NDArray[np.int64]

SEED = 20_170_403
"""The seed of all generated data."""


class ChoiceShape(NamedTuple):
    """Size of a generated market, and what its users go by."""

    num_users: int
    num_items: int
    num_samples: int
    """Choices, of all parts together."""
    num_candidates: int = 5
    """Items that a user is offered at once."""
    num_factors: int = 2
    """Length of the hidden vectors of users and items."""
    taste: float = 3.0
    """Standard deviation of what a user thinks of items; the noise of a choice has 1.28."""
    quality: float = 2.0
    """Standard deviation of what all users think of items."""
    user_exponent: float = 0.6
    item_exponent: float = 1.0


class TextShape(NamedTuple):
    """Size of a generated text, and how regular it is."""

    num_words: int
    num_classes: int
    num_sequences: int
    """Training, validation and test together."""
    num_tokens: int = 16
    """Length of a sequence."""
    num_candidates: int = 24
    """Words among which the next one has to be found: those that follow in the sequence, and others."""
    regularity: float = 0.8
    """Share of the words whose class follows from what was before; the others are of any class."""
    exponent: float = 1.0


def choices(shape: ChoiceShape) -> tuple[Tensor, Tensor]:
    """Which of some offered items a user takes: inputs N x (1 + candidates), user and items; labels N. All int64.

    User u has a hidden vector p_u, item i a hidden vector q_i and a quality w_i, all standard normal. Users come by
    Zipf's law, and each is offered distinct items drawn by it. Taken is the item with the largest utility,

        taste * <p_u, q_i> / sqrt(num_factors) + quality * w_i + standard Gumbel noise,

    which is to draw from a softmax over the items offered. A label is the place of that item among them. Who knows all
    hidden numbers is right in 76 % of the choices, who knows the qualities only in 46 %.
    """
    drawn = np.random.default_rng(SEED)
    users_UF = drawn.standard_normal((shape.num_users, shape.num_factors))
    items_IF = drawn.standard_normal((shape.num_items, shape.num_factors))
    worth_I = drawn.standard_normal(shape.num_items)
    users = _zipf(drawn, shape.num_users, shape.user_exponent, (shape.num_samples,))
    items = np.zeros((shape.num_samples, shape.num_candidates), dtype=np.int64)
    rows = np.arange(shape.num_samples)
    while len(rows):  # until no sample offers an item twice
        items[rows] = _zipf(drawn, shape.num_items, shape.item_exponent, (len(rows), shape.num_candidates))
        ordered = np.sort(items[rows], axis=1)
        rows = rows[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
    liking = np.einsum("nf,ncf->nc", users_UF[users], items_IF[items]) * (shape.taste / shape.num_factors**0.5)
    noise = -np.log(-np.log(drawn.random(items.shape)))
    taken = (liking + shape.quality * worth_I[items] + noise).argmax(1)
    return from_numpy(np.concatenate([users[:, None], items], axis=1)), from_numpy(taken)


def sequences(shape: TextShape) -> tuple[Tensor, Tensor]:
    """A text of numbered words: inputs N x (tokens + candidates), words and candidates; labels N x tokens. All int64.

    Word w is of class w modulo the number of classes; within its class it is as frequent as Zipf's law says. Classes
    are a Markov chain: with probability `regularity` the class is the one follower of those before, else any. After one
    half of the classes the follower depends on the last word's class only, after the other half on the class before
    that, too. A label is the place of the next word among the candidates. These are the distinct words that follow in
    the sequence and, in the places that are left, others of any class. Who knows all classes and followers is right in
    44 % of the words of the catalog's texts: several candidates are of the right class.
    """
    drawn = np.random.default_rng(SEED)
    half = shape.num_classes // 2
    follower_CC = np.tile(drawn.permutation(shape.num_classes), (shape.num_classes, 1))  # by the class before, the last
    follower_CC[:, half:] = drawn.permuted(follower_CC[:, half:], axis=1)
    classes = drawn.integers(shape.num_classes, size=(shape.num_sequences, shape.num_tokens + 1))
    is_regular = drawn.random(classes.shape) < shape.regularity
    for place in range(2, shape.num_tokens + 1):
        expected = follower_CC[classes[:, place - 2], classes[:, place - 1]]
        classes[:, place] = np.where(is_regular[:, place], expected, classes[:, place])
    words = _words(drawn, shape, classes)
    following = words[:, 1:]
    labels = (following[:, :, None] == following[:, None, :]).argmax(2)  # the first place of an equal word
    is_open = np.ones((shape.num_sequences, shape.num_candidates), dtype=bool)
    is_open[:, : shape.num_tokens] = labels != np.arange(shape.num_tokens)
    candidates = np.zeros(is_open.shape, dtype=np.int64)
    candidates[:, : shape.num_tokens] = following
    rows = np.arange(len(candidates))
    while len(rows):  # until no row holds a word twice
        block, opened = candidates[rows], is_open[rows]
        block[opened] = _words(drawn, shape, drawn.integers(shape.num_classes, size=int(opened.sum())))
        # of equal words the open places sort last, so that only these are drawn again
        order = np.argsort(2 * block + opened, axis=1)
        ordered = np.take_along_axis(block, order, axis=1)
        repeated = np.zeros(block.shape, dtype=bool)
        np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        candidates[rows], is_open[rows] = block, repeated
        rows = rows[repeated.any(1)]
    return from_numpy(np.concatenate([words[:, :-1], candidates], axis=1)), from_numpy(labels)


def _words(drawn: np.random.Generator, shape: TextShape, classes: Integers) -> Integers:
    """One word for each class."""
    places = _zipf(drawn, shape.num_words // shape.num_classes, shape.exponent, classes.shape)
    return classes + shape.num_classes * places


def _zipf(drawn: np.random.Generator, count: int, exponent: float, size: tuple[int, ...]) -> Integers:
    """Numbers 0 ... count - 1; j has a probability proportional to (j + 1) ** -exponent."""
    bounds = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    found: Integers = np.searchsorted(bounds[:-1], drawn.random(size) * bounds[-1], side="right").astype(np.int64)
    return found
