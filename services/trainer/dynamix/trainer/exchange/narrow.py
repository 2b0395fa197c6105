"""Codecs `bf16`, `fp16` and `int8`: narrow numbers to the owners and back; what they lose is sent later.

Every rank pushes its gradient plus its residual, narrowed, to the owners of the elements; an owner adds its own addend,
which is not narrowed, sums in float32 and sends the sum back, narrowed once for all ranks. Each keeps what it narrowed
away in its own residual. The scales of a message tell whether all of it was finite; where it was not, all ranks send
that bucket as it is, so that NaN and overflow end as in an all-reduce, and residuals stay.
"""

import math
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from .codec import BucketView, CodedSquares, ErrorFeedback, Leg, Member, Trade, owned_ranges, sum_over_ranks

BLOCK = 512
"""Elements: owners own whole blocks, messages hold whole blocks, each with a scale."""

MEASURED_EVERY = 8
"""Times a bucket is summed until its gain is measured again, which costs five passes over its numbers."""


class NarrowExchange(ErrorFeedback):
    """A codec that narrows, with error feedback on the way to the owners and back."""

    def __init__(self, name: str, narrowing: "Narrowing") -> None:
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
        own_addend = values[own].clone()
        theirs = [self._narrowing.message_bytes(len(owned)) for owned in ranges]
        mine = [theirs[member.rank]] * member.world_size
        room_for = partial(values.new_empty, dtype=torch.uint8)
        pushed, addends = room_for(sum(theirs)), room_for(sum(mine))
        self._narrowing.write(values, pushed)  # its own part too: one pass over all costs less than one for each owner
        if self._num_reduced[bucket.number] % MEASURED_EVERY == 0:
            wanted = torch.add(residual, bucket.flat)
            sent = wanted - values[:length]
            wanted[own] = sent[own] = 0  # an owner sends itself nothing
            squares = CodedSquares(float(torch.dot(wanted, wanted)), float(torch.dot(sent, sent)))
            if all(map(math.isfinite, squares)):
                self.coded = self.coded.and_more(squares)
        self._num_reduced[bucket.number] += 1
        yield Trade(addends, pushed, mine, theirs)

        total, arrived = torch.zeros_like(own_addend), torch.empty_like(own_addend)
        for sender, message in enumerate(torch.split(addends, mine)):
            if sender != member.rank:
                self._narrowing.read(message, arrived)
            total.add_(own_addend if sender == member.rank else arrived)
        answer, answers = room_for(theirs[member.rank]), room_for(sum(theirs))
        self._narrowing.write(total, answer)
        yield Trade(answers, answer.repeat(member.world_size), theirs, mine)

        if not bool(self._narrowing.scales(answers).isfinite().all()):
            yield from sum_over_ranks(bucket.flat, member)
            return
        values[own] = total
        summed = torch.empty_like(values)
        self._narrowing.read(answers, summed)
        bucket.flat.copy_(summed[: len(bucket.flat)])
        if bucket.flat.dtype != summed.dtype:  # what the gradient's own type took away: of the owner alone, once
            values[own] += summed[own]
            ends = slice(own.start, min(own.stop, len(bucket.flat)))
            values[ends].sub_(bucket.flat[ends]).nan_to_num_(0.0, 0.0, 0.0)  # float16 may overflow, as in an all-reduce
        self.residuals.put(bucket, values[:length])


SCALE_BYTES = 4


class Narrowing:
    """Writes blocks of numbers in a narrower type, each behind its scale in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._block_bytes = SCALE_BYTES + BLOCK * dtype.itemsize

    def message_bytes(self, length: int) -> int:
        """Bytes of a message of whole blocks."""
        return length // BLOCK * self._block_bytes

    def scales(self, message: Tensor) -> Tensor:
        """Scales, one per block; not finite if a number of the block was not."""
        return self._rows(message).view(torch.float32)[:, :1]

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        raise NotImplementedError

    def read(self, message: Tensor, values: Tensor) -> None:
        """Write a message's numbers into `values`."""
        blocks, numbers = self._parts(values, message)
        blocks.copy_(numbers).mul_(self.scales(message))

    def _parts(self, values: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the numbers that stand for them, by block."""
        numbers = self._rows(message).view(self._dtype)[:, SCALE_BYTES // self._dtype.itemsize :]
        return values.view(len(numbers), BLOCK), numbers

    def _rows(self, message: Tensor) -> Tensor:
        return message.view(len(message) // self._block_bytes, self._block_bytes)


TOP_EXPONENT = {torch.float16: 15, torch.bfloat16: 0}
"""Numbers stay below 2 to this: float16 ends at 65504; bfloat16 has the range of float32."""
LOWEST_EXPONENT = -100
"""Least exponent of a block's largest number: below it a scale would not be a normal float32."""


class Cast(Narrowing):
    """Narrows to a type of two bytes, by scales that are powers of 2."""

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        blocks, numbers = self._parts(values, message)
        largest = blocks.abs().amax(1, keepdim=True)
        exponent = torch.frexp(largest).exponent.clamp(min=LOWEST_EXPONENT) - TOP_EXPONENT[self._dtype]
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        self.scales(message).copy_(scale)
        numbers.copy_(blocks / scale)
        blocks.sub_(numbers.to(values.dtype).mul_(scale))


STEPS = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A block below this has the scale 0: the inverse would overflow. The residual keeps its numbers."""


class Int8(Narrowing):
    """Narrows to whole numbers of one byte."""

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def write(self, values: Tensor, message: Tensor) -> None:
        """Fill a message; what rounding took away is left in `values`."""
        blocks, numbers = self._parts(values, message)
        scale = (blocks.abs().amax(1, keepdim=True) / STEPS).float()
        scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)  # a NaN stays
        self.scales(message).copy_(scale)
        steps = (blocks * torch.where(scale == 0, 0.0, 1 / scale)).round_()
        numbers.copy_(steps)
        blocks.sub_(steps.mul_(scale))
