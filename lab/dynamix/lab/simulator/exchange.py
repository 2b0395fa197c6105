"""Communication of virtual ranks where it is not plain all-reduces: the trainer's codecs on each rank's own gradient.

In: one gradient per rank, or how far its parameters moved, and the exchange that is active in the step. Out: the sum as
real ranks would have it, bit for bit, and the time that it takes, by the bytes that each collective sends in the two
lanes of the trainer, in order. A link sends, and receives, one byte at a time: the buckets from any one on take no less
than all their bytes over the busiest direction of the slowest link.

    lane 1: end1_k = max(end1_(k-1), ready_k) + coding_k / 2 + first collective
    lane 2: end2_k = max(end2_(k-1), end1_k) + coding_k / 2 + further collectives
    link:   end_k  = max(end_(k-1), ready_k) + max_i max(sent_i, received_i) congestion_i / bandwidth_i
    ring of n bytes:  2 (N - 1) * max(mean_i (l_i + s_i), max_i s_i),  s_i = congestion_i * n / (N bandwidth_i)
    all to all:       max_i (l_i + congestion_i * max(sent_i, received_i) / bandwidth_i)
    coding: max_i slowdown_i / cores_i * (s per byte * gradient bytes + s per message * messages + s per bucket)

Uncoded gradients over owners are sent in chunks of each bucket, which are ready together (`codec.chunks_of`). A bucket
with a single all-reduce is not coded. Coding costs what it costs an idle core; of a CPU quota only its share, after a
wait for the next period (`clock`).
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Size, Tensor, nn

from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS
from dynamix.trainer.exchange.codec import (
    BucketPart,
    BucketView,
    CodedSquares,
    ErrorFeedback,
    ExchangeCodec,
    Leg,
    Member,
    Trade,
    leg_of,
    num_chunks,
    owned_ranges,
    run_alike,
)
from dynamix.trainer.exchange.narrow import BLOCK, Int8
from dynamix.trainer.exchange.plan import StepExchange, exchange_codec, member_of

from .scenario import Coding

Array64 = npt.NDArray[np.float64]


class CollectiveTraffic(NamedTuple):
    """Bytes of one collective, one number per rank."""

    sent: Array64
    received: Array64
    is_ring: bool
    """Whether it is an all-reduce, in 2 (N - 1) rounds around a ring; else all ranks send to all at once."""
    num_messages: int
    """Most that a rank codes or decodes for others; none in a ring."""


class BucketTraffic(NamedTuple):
    """One bucket: its collectives, in order, and what a rank codes for them."""

    collectives: tuple[CollectiveTraffic, ...]
    codec: str
    gradient_bytes: float
    is_continued: bool = False
    """Whether it is a further chunk of the bucket before it, and ready with that."""


StepTraffic = tuple[BucketTraffic, ...]
"""All buckets of a step; empty where nothing is sent."""


def total_bytes(traffic: StepTraffic) -> tuple[Array64, Array64]:
    """Bytes that each rank sends, and receives, in a step."""
    zero = np.zeros(1)
    collectives = [each for bucket in traffic for each in bucket.collectives]
    return sum((each.sent for each in collectives), zero), sum((each.received for each in collectives), zero)


def with_numbers(traffic: StepTraffic, num_bytes: float, world_size: int) -> StepTraffic:
    """Sum so many bytes of other numbers in the messages of the first bucket."""
    first, *others = traffic
    more = 2 * (world_size - 1) / world_size * num_bytes / max(1, len(first.collectives))
    grown = tuple(each._replace(sent=each.sent + more, received=each.received + more) for each in first.collectives)
    return first._replace(collectives=grown), *others


def run_counted(legs: Sequence[Leg]) -> tuple[CollectiveTraffic, ...]:
    """Run legs as `run_alike` does; returns the bytes of each collective."""
    world_size = len(legs)
    seen: list[list[tuple[float, float, bool, int]]] = [[] for _ in legs]

    def watched(leg: Leg, rank: int) -> Leg:
        for collective in leg:
            if isinstance(collective, Trade):
                sizes = collective.sent_sizes, collective.received_sizes
                others = [[size for other, size in enumerate(each) if other != rank] for each in sizes]
                sent, received = (collective.sent.element_size() * sum(each) for each in others)
                seen[rank].append((sent, received, False, sum(size > 0 for each in others for size in each)))
            else:
                each_way = 2 * (world_size - 1) / world_size * collective.tensor.nbytes
                seen[rank].append((each_way, each_way, True, 0))
            yield collective

    run_alike([watched(leg, rank) for rank, leg in enumerate(legs)])
    found = []
    for of_ranks in zip(*seen, strict=True):
        sent, received, is_ring, num_messages = zip(*of_ranks, strict=True)
        found.append(CollectiveTraffic(np.array(sent), np.array(received), is_ring[0], max(num_messages)))
    return tuple(found)


def exchange_times_s(
    traffic: StepTraffic,
    bandwidth: Array64,
    latency_s: Array64,
    coding: Coding,
    *,
    slowdown: float,
    computed_s: float,
    overlap: float,
) -> tuple[float, float]:
    """C of what is sent in a step, and the part of it after the slowest rank has `computed_s`.

    `bandwidth` (bytes per second, each way) and `latency_s` are those of each rank's link now. The first bucket is
    ready when the share `overlap` of computing is left, the last when it ends.
    """

    def collective_s(collective: CollectiveTraffic) -> float:
        if collective.is_ring:
            num_rounds = 2 * (len(bandwidth) - 1)
            sending_s = collective.sent / num_rounds / bandwidth
            return num_rounds * max(float((latency_s + sending_s).mean()), float(sending_s.max()))
        busiest = np.maximum(collective.sent, collective.received)
        return float((latency_s + busiest / bandwidth).max())

    def lanes_of(bucket: BucketTraffic) -> tuple[float, float, float]:
        """Seconds of a bucket in the first lane, in the second, and on the busiest link."""
        collectives, coding_s = bucket.collectives, 0.0
        if not collectives:
            return 0.0, 0.0, 0.0
        if len(collectives) > 1 or not collectives[0].is_ring:
            num_messages = sum(each.num_messages for each in collectives)
            per_byte_s = coding.s_per_byte(bucket.codec)
            coding_s = per_byte_s * bucket.gradient_bytes + coding.message_s * num_messages
            coding_s = slowdown * (coding_s + coding.bucket_s * (not bucket.is_continued))
        first_s, *further_s = map(collective_s, collectives)
        sent = np.sum([each.sent for each in collectives], axis=0)
        received = np.sum([each.received for each in collectives], axis=0)
        link_s = float((np.maximum(sent, received) / bandwidth).max())
        return coding_s / 2 + first_s, coding_s / 2 + sum(further_s), link_s

    def finish_s(ready_s: Sequence[float]) -> float:
        first = second = link = 0.0
        for (first_s, second_s, link_s), ready in zip(lanes, ready_s, strict=True):
            first = max(first, ready) + first_s
            second = max(second, first) + second_s
            link = max(link, ready) + link_s
        return max(second, link)

    lanes = [lanes_of(bucket) for bucket in traffic]
    numbers = np.cumsum([not bucket.is_continued for bucket in traffic]) - 1
    num_buckets = int(numbers[-1]) + 1
    last = max(1, num_buckets - 1)
    whole = [computed_s * (1 - overlap * (last - number) / last) for number in range(num_buckets - 1)] + [computed_s]
    return finish_s([0.0] * len(lanes)), finish_s([whole[number] for number in numbers]) - computed_s


T = TypeVar("T")


class GradientLayout:
    """All buckets of a model whose gradient is one flat vector, in the order of its parameters."""

    def __init__(self, model: nn.Module, num_buckets: int, *, forwards: bool = False) -> None:
        """Cut into `num_buckets`, or as many as there are rows."""
        self._forwards = forwards
        named = [(name, each.shape) for name, each in model.named_parameters() if each.requires_grad]
        self._sizes = [shape.numel() for _, shape in named]
        whole, start = [], 0
        for name, shape in self._ordered(named):
            whole.append(BucketPart(name, start, start + shape.numel(), shape))
            start += shape.numel()
        cuts = sorted({0, start, *(_cut(whole, round(start * n / num_buckets)) for n in range(1, num_buckets))})
        self.num_elements = start
        self.buckets = [(first, stop, _parts(whole, first, stop)) for first, stop in pairwise(cuts)]
        """Ranges of the vector that is sent, and what they hold."""

    def as_sent(self, gradients: Tensor) -> Tensor:
        """A copy of flat gradients, one per row, in the order in which they are sent."""
        return torch.cat(self._ordered(torch.split(gradients, self._sizes, dim=-1)), dim=-1)

    def as_model(self, sent: Tensor, gradient: Tensor) -> None:
        """Write a received vector back in the order of the model."""
        places = self._ordered(torch.split(gradient, self._sizes))
        for place, part in zip(places, torch.split(sent, self._ordered(self._sizes)), strict=True):
            place.copy_(part)

    def _ordered(self, each: Sequence[T]) -> list[T]:
        return list(each) if self._forwards else list(reversed(each))


def _row_length(shape: Size) -> int:
    return shape[1:].numel() if len(shape) > 1 else 1


def _cut(whole: Sequence[BucketPart], target: int) -> int:
    """The boundary of a row that is nearest to a place."""
    part = next(each for each in whole if target <= each.stop)
    length = _row_length(part.shape)
    return part.start + round((target - part.start) / length) * length


def _parts(whole: Sequence[BucketPart], first: int, stop: int) -> tuple[BucketPart, ...]:
    """Contents of a bucket: parameters, and rows of parameters under keys that name the rows."""
    found = []
    for part in whole:
        start, end = max(part.start, first), min(part.stop, stop)
        if start >= end:
            continue
        key, shape = part.key, part.shape
        if (start, end) != (part.start, part.stop):
            length = _row_length(shape)
            begin, rows = (start - part.start) // length, (end - start) // length
            key, shape = f"{key}[{begin}:{begin + rows}]", Size((rows, *shape[1:]))
        found.append(BucketPart(key, start - first, end - first, shape))
    return tuple(found)


STACKED = "int8"
"""The codec that is computed like this."""


class StackedInt8:
    """The ranks' codecs of one bucket."""

    def __init__(self) -> None:
        self._narrowing = Int8()
        self._residuals: Tensor | None = None
        self.coded = CodedSquares()
        """All ranks together; unlike real ones, it counts what owners keep for themselves as sent."""

    def take_residuals(self, rows: Tensor) -> None:
        """Add the residuals of all ranks to their gradients, one row each."""
        if self._residuals is not None:
            rows.add_(self._residuals[:, : rows.shape[1]])
            self._residuals = None

    def reduce(self, rows: Tensor, member: Member) -> tuple[tuple[CollectiveTraffic, ...], bool]:
        """Make every row the sum over ranks; False where something is not finite, and rows stay as they are."""
        num_ranks, length = rows.shape
        values = rows.new_zeros(num_ranks, -(-length // BLOCK) * BLOCK)
        values[:, :length] = rows
        if self._residuals is not None:
            values.add_(self._residuals)
        ranges = owned_ranges(values.shape[1], member, BLOCK)
        own = [values[rank, each.start : each.stop].clone() for rank, each in enumerate(ranges)]
        wanted = torch.linalg.vector_norm(values).item() ** 2
        addends = self._narrowed(values)
        sent = torch.linalg.vector_norm(addends).item() ** 2
        total = torch.zeros_like(values[0])
        for rank, (each, mine) in enumerate(zip(ranges, own, strict=True)):
            addends[rank, each.start : each.stop] = mine
            total.add_(addends[rank])
        summed = self._narrowed(total)
        if not bool(summed.isfinite().all()):
            return _traffic(self._narrowing, ranges), False
        self.coded = self.coded.and_more(CodedSquares(wanted, sent))
        for rank, each in enumerate(ranges):
            values[rank, each.start : each.stop] = total[each.start : each.stop]
        self._residuals = values
        rows.copy_(summed[:length].expand_as(rows))
        return _traffic(self._narrowing, ranges), True

    def _narrowed(self, values: Tensor) -> Tensor:
        """The numbers as received; the residuals are left in `values`."""
        flat = values.view(-1)
        message = flat.new_empty(self._narrowing.message_bytes(len(flat)), dtype=torch.uint8)
        self._narrowing.write(flat, message)
        arrived = torch.empty_like(flat)
        self._narrowing.read(message, arrived)
        return arrived.view(values.shape)


def _traffic(narrowing: Int8, ranges: Sequence[range]) -> tuple[CollectiveTraffic, ...]:
    """Traffic to the owners, and back."""
    sizes = np.array([narrowing.message_bytes(len(each)) for each in ranges], dtype=np.float64)
    away, home = sizes.sum() - sizes, (len(sizes) - 1) * sizes
    owners = (sizes > 0).astype(np.int64)
    num_messages = int((owners.sum() - owners + (len(sizes) - 1) * owners).max())
    return (
        CollectiveTraffic(away, home, is_ring=False, num_messages=num_messages),
        CollectiveTraffic(home, away, is_ring=False, num_messages=num_messages),
    )


MOVES_BUCKET_BYTES = 25 << 20
"""Bucket in which movements are sent: DDP's largest, and no small first one."""


class VirtualExchange:
    """Sums the gradients of virtual ranks as real ranks would, and counts what they would send."""

    def __init__(
        self, model: nn.Module, world_size: int, *, num_buckets: int, gradient_bytes: int, num_together: int = 1
    ) -> None:
        """`gradient_bytes` is the pretended size of a gradient; so many ranks of a node sum theirs first."""
        self._gradients = GradientLayout(model, num_buckets)
        self._moves = GradientLayout(model, math.ceil(gradient_bytes / MOVES_BUCKET_BYTES), forwards=True)
        self.world_size, self.num_members, self._num_together = world_size, world_size // num_together, num_together
        self._gradient_bytes = gradient_bytes
        self._codecs: dict[str, list[ExchangeCodec]] = {}
        self._stacked: dict[tuple[bool, int], StackedInt8] = {}
        """Codecs by kind (gradients or movements) and the bucket's number."""

    def coded(self) -> CodedSquares:
        """Squared norms of what lossy codecs have sent and should have sent, of all ranks."""
        codecs = [*self._stacked.values(), *chain.from_iterable(self._codecs.values())]
        lossy = (each.coded for each in codecs if isinstance(each, StackedInt8 | ErrorFeedback))
        return reduce(CodedSquares.and_more, lossy, CodedSquares())

    def sum(self, rows: Tensor, step: StepExchange, total: Tensor, *, of_moves: bool = False) -> StepTraffic:
        """Write into `total` what the ranks make of `rows`: their weighted gradients, or how far they have moved.

        Costs what N ranks code: N (N - 1) messages per bucket by codecs that send to owners, but not by `int8`.
        """
        layout = self._moves if of_moves else self._gradients
        exchange, sent = step.exchange, layout.as_sent(self._together(rows))
        if exchange.shares:
            by_node = np.reshape(exchange.shares, (self.num_members, -1)).sum(1)
            exchange = replace(exchange, shares=tuple(by_node.tolist()))
        flushes = exchange.codec in LOSSY_CODECS and step.flushes
        members = [member_of(exchange, rank, self.num_members) for rank in range(self.num_members)]
        factor = self._gradient_bytes / (layout.num_elements * sent.element_size())
        coded_as = EXACT.codec if flushes else exchange.codec
        is_chunked = exchange.route == "shares" and exchange.codec == EXACT.codec  # same bits in one piece
        buckets: list[BucketTraffic] = []
        with torch.inference_mode():
            for number, (first, stop, parts) in enumerate(layout.buckets):
                rows = sent[:, first:stop]
                views = [BucketView(number, row, parts) for row in rows.unbind()]
                if exchange.codec == STACKED:
                    stacked = self._stacked.setdefault((of_moves, number), StackedInt8())
                    seen = self._sum_stacked(stacked, rows, views, members, flushes=flushes)
                else:
                    seen = self._sum_bucket(exchange.codec, views, members, flushes=flushes)
                gradient_bytes = factor * views[0].flat.nbytes
                chunks = num_chunks(gradient_bytes) if is_chunked else 1
                collectives = tuple(_scaled(each, 1 / chunks) for each in _pretended(seen, members[0], factor))
                buckets += [
                    BucketTraffic(collectives, coded_as, gradient_bytes / chunks, chunk > 0) for chunk in range(chunks)
                ]
            layout.as_model(sent[0], total)
        return tuple(buckets)

    def average_nodes(self, means: Tensor, counts: Sequence[int]) -> None:
        """Replace the mean gradient of each rank's samples by that of its node's, as in local steps."""
        if self._num_together > 1:
            weights = means.new_tensor(counts)[:, None]
            of_nodes = self._together(means * weights) / self._together(weights).clamp_(min=1)
            means.copy_(of_nodes.repeat_interleave(self._num_together, 0))

    def _together(self, rows: Tensor) -> Tensor:
        """The sums of the rows of each node."""
        return rows if self._num_together == 1 else rows.reshape(self.num_members, -1, rows.shape[1]).sum(1)

    def _sum_bucket(
        self, codec: str, views: Sequence[BucketView], members: Sequence[Member], *, flushes: bool = False
    ) -> tuple[CollectiveTraffic, ...]:
        if codec not in self._codecs:
            self._codecs[codec] = [exchange_codec(codec) for _ in range(self.num_members)]
        return run_counted(
            [
                leg_of(own, view, member, flushes=flushes)
                for own, view, member in zip(self._codecs[codec], views, members, strict=True)
            ]
        )

    def _sum_stacked(
        self,
        stacked: StackedInt8,
        rows: Tensor,
        views: Sequence[BucketView],
        members: Sequence[Member],
        *,
        flushes: bool,
    ) -> tuple[CollectiveTraffic, ...]:
        if self.num_members == 1:
            return ()
        if flushes:
            stacked.take_residuals(rows)
            return self._sum_bucket(EXACT.codec, views, members)
        seen, is_finite = stacked.reduce(rows, members[0])
        return seen if is_finite else seen + self._sum_bucket(EXACT.codec, views, members)


def _scaled(collective: CollectiveTraffic, factor: float) -> CollectiveTraffic:
    return collective._replace(sent=factor * collective.sent, received=factor * collective.received)


def _pretended(seen: tuple[CollectiveTraffic, ...], member: Member, factor: float) -> tuple[CollectiveTraffic, ...]:
    """The counted traffic, for a gradient that is larger by a factor than the model's.

    Owners own whole blocks, which of a small model are few, so that some own twice as much as others; where a larger
    one is pretended, its owners own what they should.
    """
    if factor == 1.0 or member.world_size < 2:
        return seen
    shares = np.array(member.shares or (1.0,) * member.world_size)
    shares = shares / shares.sum()
    is_push, found = True, []
    for each in seen:
        scaled = _scaled(each, factor)
        if not each.is_ring:  # to the owners, then back from them
            total = float(scaled.sent.sum())
            away, home = total * (1 - shares) / (len(shares) - 1), total * shares
            sent, received = (away, home) if is_push else (home, away)
            scaled, is_push = scaled._replace(sent=sent, received=received), not is_push
        found.append(scaled)
    return tuple(found)
