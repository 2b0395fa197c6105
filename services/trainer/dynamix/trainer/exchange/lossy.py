"""Lossy exchange: narrow numbers to the owners and back, and what they lose is sent later.

Every rank pushes its gradient plus its residual, narrowed, to the owners of the elements; an owner adds its own addend,
which is not narrowed, sums in float32 and sends the sum back, narrowed once for all ranks. What narrowing took away is
kept: by the rank that pushed, and what the sum lost by its owner, in its own residual of the elements that it owns.
There that is as good as anywhere: a later push of any rank makes up for it. So there is one residual per rank and
parameter, and none depends on who owns what.

A message's scales say whether all of it was finite, and a sum over what was not is not finite either: the owner's
answer tells all ranks, which then send that bucket as it is, so that NaN and overflow end as in an all-reduce. The
residuals stay as they were.
"""

import math
from collections import Counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .codec import BucketView, CodedSquares, Member
from .collectives import Leg, Trade
from .owners import OwnedRange, owned_ranges, sum_over_ranks
from .residuals import ErrorFeedback

BLOCK = 512
"""Elements: owners own whole blocks, messages hold whole blocks, int8 has a scale for each."""

MEASURED_EVERY = 8
"""Times a bucket is summed until its gain is measured again, which costs five passes over its numbers."""


class Narrowing(Protocol):
    """How numbers become bytes, some scales in float32 first and then the numbers; any number of whole blocks."""

    def message_bytes(self, length: int) -> int:
        """Size of the message with so many numbers; a multiple of 4."""

    def scales(self, message: Tensor, length: int) -> Tensor:
        """The scales in a message, as a view: not finite where the numbers were not."""

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message, and leave in `values` what it lacks."""

    def read(self, message: Tensor, values: Tensor) -> None:
        """Write into `values` what a message says, the same bits on every rank."""


class LossyExchange(ErrorFeedback):
    """A codec that narrows, with error feedback on the way to the owners and back."""

    is_lossless = False

    def __init__(self, name: str, narrowing: Narrowing) -> None:
        super().__init__()
        self.name = name
        self._narrowing = narrowing
        self._num_reduced: Counter[int] = Counter()
        """By bucket."""
        self._coded = CodedSquares()

    def coded(self) -> CodedSquares:
        """What was to be sent to owners, and what was, of those buckets that were looked at."""
        return self._coded

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`: one trade to the owners, one back."""
        if member.world_size == 1:
            return
        residual = self._residuals.of(bucket)
        values = _padded_sum(bucket.flat, residual)
        plan = _Plan.of(len(values), member, self._narrowing)
        mine = plan.ranges[member.rank]

        pushed, addends = _messages(values, plan.theirs), _messages(values, plan.mine)
        for owned, message in plan.others(pushed):
            self._narrowing.write(values[owned.start : owned.stop], message)
        if self._num_reduced[bucket.number] % MEASURED_EVERY == 0:
            self._measure(torch.add(residual, bucket.flat), values, mine)
        self._num_reduced[bucket.number] += 1
        yield Trade(addends, pushed, plan.mine, plan.theirs)

        total = self._total(values[mine.start : mine.stop], torch.split(addends, plan.mine))
        answer = _messages(values, [self._narrowing.message_bytes(mine.length)])
        self._narrowing.write(total, answer)
        answers = _messages(values, plan.theirs)
        yield Trade(answers, answer.repeat(sum(1 for size in plan.mine if size)), plan.theirs, plan.mine)

        come = [(mine, answer), *plan.others(answers)]
        scales = torch.cat([self._narrowing.scales(message, owned.length) for owned, message in come])
        if not bool(scales.isfinite().all()):
            yield from sum_over_ranks(bucket.flat, member)
            return
        values[mine.start : mine.stop] = total
        summed = torch.empty_like(values)
        for owned, message in come:
            self._narrowing.read(message, summed[owned.start : owned.stop])
        bucket.flat.copy_(summed[: len(bucket.flat)])
        if bucket.flat.dtype != summed.dtype:  # what the gradient's own type took away: of the owner alone, once
            values[mine.start : mine.stop] += summed[mine.start : mine.stop]
            ends = slice(mine.start, min(mine.stop, len(bucket.flat)))
            values[ends].sub_(bucket.flat[ends]).nan_to_num_(0.0, 0.0, 0.0)  # float16 may overflow, as in an all-reduce
        self._residuals.put(bucket, values[: len(residual)])

    def _measure(self, wanted: Tensor, left: Tensor, mine: OwnedRange) -> None:
        """Add what was to be sent, and what was, which is that but for what is left; an owner sends itself nothing."""
        sent = wanted - left[: len(wanted)]
        found = []
        for each in (wanted, sent):
            each[mine.start : mine.stop] = 0
            found.append(float(torch.dot(each, each)))
        if all(map(math.isfinite, found)):
            self._coded = self._coded.and_more(CodedSquares(*found))

    def _total(self, own: Tensor, addends: tuple[Tensor, ...]) -> Tensor:
        """The sum of an owner, in rank order; an empty message is this rank's own addend."""
        if not len(own):
            return own
        total, addend = torch.zeros_like(own), torch.empty_like(own)
        for message in addends:
            if len(message):
                self._narrowing.read(message, addend)
            total.add_(addend if len(message) else own)
        return total


class _Plan(NamedTuple):
    """Which messages a rank exchanges."""

    ranges: list[OwnedRange]
    mine: list[int]
    """Bytes of the messages about this rank's elements, from or to each rank; none with itself."""
    theirs: list[int]
    """Bytes of the messages about the elements of each other rank."""

    @classmethod
    def of(cls, length: int, member: Member, narrowing: Narrowing) -> "_Plan":
        ranges = owned_ranges(length, member, BLOCK)
        sizes = [narrowing.message_bytes(owned.length) for owned in ranges]
        mine = [sizes[member.rank]] * member.world_size
        mine[member.rank] = sizes[member.rank] = 0
        return cls(ranges, mine, sizes)

    def others(self, messages: Tensor) -> list[tuple[OwnedRange, Tensor]]:
        """The messages about other ranks' elements, each with its range; empty ones left out."""
        pieces = zip(self.ranges, torch.split(messages, self.theirs), strict=True)
        return [(owned, message) for owned, message in pieces if len(message)]


def _padded_sum(gradient: Tensor, residual: Tensor) -> Tensor:
    """Their sum, with zeros up to whole blocks."""
    length = len(gradient)
    values = residual.new_empty(-(-length // BLOCK) * BLOCK)
    values[length:] = 0
    torch.add(residual, gradient, out=values[:length])
    return values


def _messages(like: Tensor, sizes: list[int]) -> Tensor:
    """Room for messages, on the same device."""
    return like.new_empty(sum(sizes), dtype=torch.uint8)
