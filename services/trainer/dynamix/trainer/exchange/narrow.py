"""Codecs `bf16`, `fp16` and `int8`: narrow numbers to the owners and back; what they lose is sent later.

Every rank pushes its gradient plus its residual, narrowed, to the owners of the elements; an owner adds its own addend,
which is not narrowed, sums in float32 and sends the sum back, narrowed once for all ranks. The rank that pushed keeps
what narrowing took away; the owner keeps what the sum lost, in its own residual of the elements that it owns. So there
is one residual per rank and parameter, and none depends on who owns what.

The scales of a message tell whether all of it was finite, and a sum over what was not is not finite either: all ranks
then send that bucket as it is, so that NaN and overflow end as in an all-reduce. The residuals stay as they were.
"""

import math
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from .codec import BucketView, CodedSquares, ErrorFeedback, Leg, Member, Trade, owned_ranges, sum_over_ranks

BLOCK = 512
"""Elements: owners own whole blocks, messages hold whole blocks, int8 has a scale for each."""

MEASURED_EVERY = 8
"""Times a bucket is summed until its gain is measured again, which costs five passes over its numbers."""


class NarrowExchange(ErrorFeedback):
    """A codec that narrows, with error feedback on the way to the owners and back."""

    def __init__(self, name: str, narrowing: "Cast | Int8") -> None:
        super().__init__()
        self.name = name
        self._narrowing = narrowing
        self._num_reduced: Counter[int] = Counter()
        """Number of sums, by bucket."""

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`: once to the owners, once back."""
        if member.world_size == 1:
            return
        residual = self.residuals.of(bucket)
        length = len(residual)
        values = residual.new_zeros(-(-length // BLOCK) * BLOCK)
        torch.add(residual, bucket.flat, out=values[:length])
        ranges = owned_ranges(len(values), member, BLOCK)
        own = slice(ranges[member.rank].start, ranges[member.rank].stop)
        # bytes of the messages about each other rank's elements, and from or to each rank about this one's
        theirs = [self._narrowing.message_bytes(len(owned)) for owned in ranges]
        mine = [theirs[member.rank]] * member.world_size
        mine[member.rank] = theirs[member.rank] = 0
        room_for = partial(values.new_empty, dtype=torch.uint8)
        pushed, addends = room_for(sum(theirs)), room_for(sum(mine))
        for owned, message in _by_owner(pushed, ranges, theirs):
            self._narrowing.write(values[owned.start : owned.stop], message)
        if self._num_reduced[bucket.number] % MEASURED_EVERY == 0:
            wanted = torch.add(residual, bucket.flat)
            sent = wanted - values[:length]
            wanted[own] = sent[own] = 0  # an owner sends itself nothing
            squares = CodedSquares(float(torch.dot(wanted, wanted)), float(torch.dot(sent, sent)))
            if all(map(math.isfinite, squares)):
                self.coded = self.coded.and_more(squares)
        self._num_reduced[bucket.number] += 1
        yield Trade(addends, pushed, mine, theirs)

        total = torch.zeros_like(values[own])
        addend = torch.empty_like(total)
        for sender, message in enumerate(torch.split(addends, mine)):
            if sender == member.rank:
                addend.copy_(values[own])
            else:
                self._narrowing.read(message, addend)
            total.add_(addend)
        answer = room_for(self._narrowing.message_bytes(len(total)))
        self._narrowing.write(total, answer)
        answers = room_for(sum(theirs))
        yield Trade(answers, answer.repeat(sum(1 for size in mine if size)), theirs, mine)

        come = [(ranges[member.rank], answer), *_by_owner(answers, ranges, theirs)]
        scales = torch.cat([self._narrowing.scales(message, len(owned)) for owned, message in come])
        if not bool(scales.isfinite().all()):
            yield from sum_over_ranks(bucket.flat, member)
            return
        values[own] = total
        summed = torch.empty_like(values)
        for owned, message in come:
            self._narrowing.read(message, summed[owned.start : owned.stop])
        bucket.flat.copy_(summed[: len(bucket.flat)])
        if bucket.flat.dtype != summed.dtype:  # what the gradient's own type took away: of the owner alone, once
            values[own] += summed[own]
            ends = slice(own.start, min(own.stop, len(bucket.flat)))
            values[ends].sub_(bucket.flat[ends]).nan_to_num_(0.0, 0.0, 0.0)  # float16 may overflow, as in an all-reduce
        self.residuals.put(bucket, values[:length])


def _by_owner(messages: Tensor, ranges: list[range], sizes: list[int]) -> list[tuple[range, Tensor]]:
    """The messages about other ranks' elements, each with these; empty ones left out."""
    pieces = zip(ranges, torch.split(messages, sizes), strict=True)
    return [(owned, message) for owned, message in pieces if len(message)]


SCALE_BYTES = 4
TOP_EXPONENT = {torch.float16: 15, torch.bfloat16: 0}
"""Numbers stay below 2 to this: float16 ends at 65504; bfloat16 has the range of float32."""
LOWEST_EXPONENT = -100
"""Least exponent of a block's largest number: below it a scale would not be a normal float32."""


class Cast:
    """Narrows whole blocks of numbers to a type of two bytes, behind a scale in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._top = TOP_EXPONENT[dtype]

    def message_bytes(self, length: int) -> int:
        """Two per number and one scale."""
        return SCALE_BYTES + 2 * length if length else 0

    def scales(self, message: Tensor, length: int) -> Tensor:
        """The one scale, NaN where a number was not finite."""
        return message[: SCALE_BYTES if length else 0].view(torch.float32)

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        if not len(values):
            return
        largest = torch.maximum(values.amax(), -values.amin())
        exponent = torch.frexp(largest).exponent.clamp(min=LOWEST_EXPONENT) - self._top
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        self.scales(message, len(values)).copy_(scale)
        numbers = message[SCALE_BYTES:].view(self._dtype)
        numbers.copy_(values / scale)
        values.sub_(numbers.to(values.dtype).mul_(scale))

    def read(self, message: Tensor, values: Tensor) -> None:
        """Write a message's numbers into `values`."""
        if len(values):
            values.copy_(message[SCALE_BYTES:].view(self._dtype)).mul_(self.scales(message, len(values)))


STEPS = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A block below this has the scale 0: the inverse would overflow. The residual keeps its numbers."""


class Int8:
    """Narrows numbers to int8, with a scale in float32 for each block of `BLOCK`."""

    def message_bytes(self, length: int) -> int:
        """Bytes of a message: one per number and four per block."""
        return length + SCALE_BYTES * (length // BLOCK)

    def scales(self, message: Tensor, length: int) -> Tensor:
        """Scales, one per block; not finite if a number of the block was not."""
        return message[: SCALE_BYTES * (length // BLOCK)].view(torch.float32)

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        if not len(values):
            return
        blocks, scales, numbers = self._parts(values, message)
        largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
        scale = (largest / STEPS).float()
        scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)  # a NaN stays
        scales.copy_(scale)
        steps = (blocks * torch.where(scale == 0, 0.0, 1 / scale)).round_()
        numbers.copy_(steps)
        blocks.sub_(steps.mul_(scale))

    def read(self, message: Tensor, values: Tensor) -> None:
        """Write a message's numbers into `values`."""
        if len(values):
            blocks, scales, numbers = self._parts(values, message)
            blocks.copy_(numbers).mul_(scales)

    def _parts(self, values: Tensor, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers, the scales and the bytes, each by block."""
        scales = self.scales(message, len(values))
        numbers = message[SCALE_BYTES * len(scales) :].view(torch.int8)
        return values.view(-1, BLOCK), scales.view(-1, 1), numbers.view(-1, BLOCK)
