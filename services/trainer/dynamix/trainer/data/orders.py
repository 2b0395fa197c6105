"""The order of an epoch's samples: a permutation of our own, or what the script's sampler draws.

Rank 0 draws for a script's sampler and all ranks get its numbers, so that no difference between processes can make a
sample count twice or never. It draws under generators seeded by the epoch: a resumed run gets the same order again.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler

from .fingerprint import ObjectExchange, compare_samples
from .random_numbers import RandomNumbers, seed_all

Order = npt.NDArray[np.int64]

OwnSampler = Callable[[int], Sequence[int]] | Sampler[int]
"""A script's own: a function of the epoch's number, or a sampler of torch."""

NOT_DRAWN = np.iinfo(np.int64).min
"""What rank 0 hands out instead of an index where its sampler failed."""


class DataIdentity(NamedTuple):
    """What the order of the samples depends on; a position means nothing in another order."""

    num_samples: int
    seed: int
    shuffle: bool
    sampler: str = ""
    """Name of the script's own sampler."""
    num_tokens: int | None = None
    """Tokens of an epoch, where samples count by their tokens."""

    @property
    def size(self) -> int:
        """Size of an epoch in what batch sizes count: samples or tokens."""
        return self.num_samples if self.num_tokens is None else self.num_tokens


class OrderExchange(ObjectExchange, Protocol):
    """How rank 0's numbers come to all ranks, and how they agree on the end of a stream."""

    def gather_numbers(self, mine: Sequence[int], meanwhile: Callable[[], None]) -> list[tuple[int, ...]]:
        """Numbers of each rank; `meanwhile` is called again and again until all have come."""

    def share_order(self, order: Order, *, waits: bool = True) -> Order:
        """Rank 0's order; what the others pass says how long it is."""


class Orders(ABC):
    """The orders of all epochs, equal on all ranks."""

    def __init__(self, identity: DataIdentity) -> None:
        self.identity = identity
        self._token_counts: Order | None = None
        self._newest: tuple[int, Order] | None = None
        self._ends: tuple[int, Order] | None = None
        self._expected: tuple[int, int] | None = None

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.identity.num_samples

    def connect(self, exchange: OrderExchange, dataset: Dataset[Any], loader_options: Mapping[str, Any]) -> None:
        """Communicate with the other ranks from now on; a collective call.

        Raises:
            ValueError: on all ranks, when their data sets are seen to differ.
        """
        compare_samples(dataset, self.identity.seed, exchange, loader_options)

    def count_by_tokens(self, token_counts: Sequence[int], dataset: object, *, most: int) -> None:
        """Let each sample of a data set count by its tokens instead of as one.

        Raises:
            ValueError: when the counts are not one whole number per sample, are all 0, or one is above `most`.
        """
        counts = np.asarray(token_counts)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.min(initial=0) < 0 or counts.sum() < 1:
            raise ValueError("token_counts: pass one whole number per sample, not negative and not all 0")
        if isinstance(dataset, Sized) and len(counts) != len(dataset):
            raise ValueError(f"token_counts: {len(counts)} numbers for {len(dataset)} samples")
        if counts.max() > most:
            raise ValueError(
                f"token_counts: a sample has {counts.max()} tokens, but a batch at most {most} (max_local_batch_size, "
                "micro_batch_size), for sizes are in tokens: raise the bound or cut the sample"
            )
        self._token_counts = counts.astype(np.int64)
        num_tokens = round(int(counts.sum()) * self.num_samples / len(counts))
        self.identity = self.identity._replace(num_tokens=num_tokens)

    @property
    def has_tokens(self) -> bool:
        """Whether samples count by their tokens."""
        return self._token_counts is not None

    def ends_of(self, epoch: int) -> Order:
        """Tokens of an epoch up to and with each sample of its order.

        Raises:
            ValueError: when the epoch has no token that counts.
        """
        assert self._token_counts is not None, "samples count by themselves"
        if self._ends is None or self._ends[0] != epoch:
            ends: Order = np.cumsum(self._token_counts[self.order_of(epoch)])
            if ends[-1] < 1:
                raise ValueError(f"token_counts: epoch {epoch} has no token that counts")
            self._ends = (epoch, ends)
        return self._ends[1]

    def size_of(self, epoch: int) -> int:
        """Samples or tokens of an epoch."""
        return self.num_samples if self._token_counts is None else int(self.ends_of(epoch)[-1])

    def order_of(self, epoch: int) -> Order:
        """The samples of an epoch, in order; the newest epoch's is kept."""
        if self._newest is None or self._newest[0] != epoch:
            self._newest = (epoch, self._make_order(epoch))
        return self._newest[1]

    def digest_of(self, _epoch: int) -> int | None:
        """A number for a checkpoint that tells orders apart; `None` where the identity does."""
        return None

    def expect(self, epoch: int, digest: int | None) -> None:
        """Refuse another order for an epoch than the one that had this digest."""
        self._expected = None if digest is None else (epoch, digest)

    @abstractmethod
    def _make_order(self, epoch: int) -> Order:
        """The order of an epoch."""


class Permutations(Orders):
    """Every sample once per epoch, shuffled by the seed; no communication."""

    def __init__(self, num_samples: int, seed: int, *, shuffle: bool) -> None:
        super().__init__(DataIdentity(num_samples, seed, shuffle))

    def _make_order(self, epoch: int) -> Order:
        data = self.identity
        return epoch_order(data.num_samples, data.seed, epoch, shuffle=data.shuffle)


class SampledOrders(Orders):
    """What a script's sampler draws in rank 0; every new epoch is a collective call."""

    def __init__(self, sampler: OwnSampler, seed: int) -> None:
        """Find out how many samples an epoch has.

        Raises:
            ValueError: when the sampler divides samples among ranks, makes batches, or draws nothing.
        """
        self._name: str = getattr(sampler, "__name__", type(sampler).__name__)
        if getattr(sampler, "num_replicas", 1) != 1:
            raise ValueError(
                f"sampler: {self._name} gives each rank a part of the samples, which session.loader does itself: pass "
                "what it samples from, or nothing, and not the shuffle=False that a DataLoader has beside it"
            )
        self._sampler = sampler
        self._seed = seed
        self._exchange: OrderExchange | None = None
        num_samples = len(sampler) if isinstance(sampler, Sized) else len(self._draw(0))
        if num_samples < 1:
            raise ValueError(f"sampler: {self._name} draws no sample")
        super().__init__(DataIdentity(num_samples, seed, shuffle=True, sampler=self._name))

    def connect(self, exchange: OrderExchange, dataset: Dataset[Any], loader_options: Mapping[str, Any]) -> None:
        """Share orders with all ranks from now on."""
        super().connect(exchange, dataset, loader_options)
        self._exchange = exchange

    def digest_of(self, epoch: int) -> int | None:
        """Digest of the newest epoch drawn."""
        newest = self._newest
        return zlib.crc32(newest[1].tobytes()) if newest is not None and newest[0] == epoch else None

    def order_of(self, epoch: int) -> Order:
        """The samples of an epoch, in order.

        Raises:
            ValueError: in rank 0, when the sampler draws another number of samples than at first, or no indices; on all
                ranks, when it draws another order than in a saved run.
            RuntimeError: in the others, when rank 0 has failed.
        """
        order = super().order_of(epoch)
        if self._expected is not None and self._expected[0] == epoch and self._expected[1] != self.digest_of(epoch):
            raise ValueError(
                f"sampler: {self._name} draws another order for epoch {epoch} than in the saved run, so samples would "
                "be repeated or left out: it may depend on the epoch and on the random numbers of torch, numpy and "
                "Python only, which are seeded by it"
            )
        return order

    def _make_order(self, epoch: int) -> Order:
        assert self._exchange is not None, "not connected"
        failed = np.full(self.num_samples, NOT_DRAWN)
        if self._exchange.rank == 0:
            try:
                order = self._checked(epoch)
            except BaseException:
                self._exchange.share_order(failed)
                raise
            return self._exchange.share_order(order, waits=False)  # it may be the only one to look at a batch now
        order = self._exchange.share_order(failed)
        if order[0] == NOT_DRAWN:
            raise RuntimeError(f"rank 0 could not draw the order of epoch {epoch}: its error says why")
        return order

    def _checked(self, epoch: int) -> Order:
        order = self._draw(epoch)
        if len(order) != self.num_samples:
            raise ValueError(
                f"sampler: {self._name} draws {len(order)} samples in epoch {epoch}, but {self.num_samples} at first: "
                "all epochs must have the same number"
            )
        return order

    def _draw(self, epoch: int) -> Order:
        sampler = self._sampler
        with _seeded(self._seed, epoch, getattr(sampler, "generator", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            drawn = sampler(epoch) if callable(sampler) else list(sampler)
        try:
            order = np.asarray(drawn)
        except ValueError:  # batches of unequal lengths
            order = np.empty((0, 0))
        if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu"):
            raise ValueError(
                f"sampler: {self._name} must yield indices, one whole number after the other; session.loader makes the "
                "batches: of a batch sampler pass the sampler inside it"
            )
        return order.astype(np.int64)


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> Order:
    """The order of an epoch's samples: a permutation that depends on seed and epoch only."""
    order = np.arange(num_samples, dtype=np.int64)
    if shuffle:
        np.random.default_rng((seed, epoch)).shuffle(order)
    return order


@contextmanager
def _seeded(seed: int, epoch: int, generator: object) -> Iterator[None]:
    """Seed all random numbers that a sampler may use, and put them back afterwards."""
    before, own = RandomNumbers.capture(), generator if isinstance(generator, torch.Generator) else torch.Generator()
    of_own = own.get_state()
    try:
        own.manual_seed(seed_all(seed, epoch))
        yield
    finally:
        before.restore()
        own.set_state(of_own)
