"""Traffic: what the collectives of a step put on the wire, counted while the codecs of all ranks run."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dynamix.trainer.exchange.collectives import Collective, Leg, Trade, run_alike

Array64 = npt.NDArray[np.float64]


class CollectiveTraffic(NamedTuple):
    """Bytes of one collective, one number per rank."""

    sent: Array64
    received: Array64
    is_ring: bool
    """Whether it is an all-reduce, in 2 (N - 1) rounds around a ring; else all ranks send to all at once."""
    num_messages: int
    """Most that a rank codes or decodes for others; none in a ring."""

    def scaled(self, factor: float) -> Self:
        """The same collective with `factor` times the bytes."""
        return self._replace(sent=factor * self.sent, received=factor * self.received)

    def dealt(self, shares: Array64, *, is_push: bool) -> Self:
        """The same bytes in all, as owners of exactly these shares of the gradient would send and receive them."""
        total = float(self.sent.sum())
        away, home = total * (1 - shares) / (len(shares) - 1), total * shares
        return self._replace(sent=away, received=home) if is_push else self._replace(sent=home, received=away)


class CodedAs(NamedTuple):
    """What a rank codes and decodes of a bucket."""

    codec: str
    gradient_bytes: float
    """Bytes of the gradient itself."""


class BucketTraffic(NamedTuple):
    """The collectives of one bucket, in order."""

    collectives: tuple[CollectiveTraffic, ...]
    coded: CodedAs
    is_continued: bool = False
    """Whether it is a further chunk of the bucket before it, and ready with that."""

    def in_chunks(self, count: int) -> tuple["BucketTraffic", ...]:
        """The same bucket in equal chunks, each with as many messages."""
        collectives = tuple(each.scaled(1 / count) for each in self.collectives)
        coded = self.coded._replace(gradient_bytes=self.coded.gradient_bytes / count)
        return tuple(BucketTraffic(collectives, coded, number > 0) for number in range(count))


class StepTraffic(NamedTuple):
    """All buckets of a step."""

    buckets: tuple[BucketTraffic, ...]

    def and_then(self, later: "StepTraffic") -> "StepTraffic":
        """Both, one behind the other."""
        return StepTraffic(self.buckets + later.buckets)

    def sent_bytes(self) -> Array64:
        """By rank."""
        return _total([each.sent for bucket in self.buckets for each in bucket.collectives])

    def received_bytes(self) -> Array64:
        """By rank."""
        return _total([each.received for bucket in self.buckets for each in bucket.collectives])


NOTHING = StepTraffic(())
"""What ranks send in a step that ends no round."""


def all_reduced(num_bytes: float, world_size: int) -> StepTraffic:
    """What an all-reduce of so many bytes sends, which are no part of the gradient."""
    each_way = np.full(world_size, 2 * (world_size - 1) / world_size * num_bytes)
    ring = CollectiveTraffic(each_way, each_way, is_ring=True, num_messages=0)
    return StepTraffic((BucketTraffic((ring,), CodedAs("none", 0.0)),))


class _RankTraffic(NamedTuple):
    """What one rank's part of a collective was."""

    sent: float
    received: float
    is_ring: bool
    num_messages: int


def run_counted(legs: Sequence[Leg]) -> tuple[CollectiveTraffic, ...]:
    """Run legs as `run_alike` does; returns the bytes of each collective."""
    seen: list[list[_RankTraffic]] = [[] for _ in legs]
    run_alike([_watched(leg, rank, len(legs), seen[rank]) for rank, leg in enumerate(legs)])
    return tuple(
        CollectiveTraffic(
            np.array([each.sent for each in of_ranks]),
            np.array([each.received for each in of_ranks]),
            of_ranks[0].is_ring,
            max(each.num_messages for each in of_ranks),
        )
        for of_ranks in zip(*seen, strict=True)
    )


def _watched(leg: Leg, rank: int, world_size: int, seen: list[_RankTraffic]) -> Leg:
    for collective in leg:
        seen.append(_counted(collective, rank, world_size))
        yield collective


def _counted(collective: Collective, rank: int, world_size: int) -> _RankTraffic:
    if not isinstance(collective, Trade):
        each_way = 2 * (world_size - 1) / world_size * collective.tensor.nbytes
        return _RankTraffic(each_way, each_way, True, 0)
    sizes = collective.sent_sizes, collective.received_sizes
    others = [[size for other, size in enumerate(each) if other != rank] for each in sizes]
    sent, received = (collective.sent.element_size() * sum(each) for each in others)
    return _RankTraffic(sent, received, False, sum(size > 0 for each in others for size in each))


def _total(arrays: Sequence[Array64]) -> Array64:
    return np.sum(arrays, axis=0) if arrays else np.zeros(1)
