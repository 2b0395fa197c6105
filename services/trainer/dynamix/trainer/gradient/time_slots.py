"""Every rank's compute time, carried by the gradient's own all-reduce: one slot per rank behind the last bucket.

A rank writes seconds per sample into its slot and zero into the others'. x + 0 is x in every format and order, so all
ranks read the same numbers, to the bit; they must, for each derives the split from them alone. A slot has the
gradient's format: 24 binary digits in float32, 11 in float16, 8 in bfloat16, which is 0.4 %. It counts milliseconds, so
that float16 holds from 60 ns to 65 s per sample.

No further pass over the gradient: the bucket is weighed into a buffer with room behind it, instead of in place. The
buffer keeps memory of the size of one bucket; where gradients are views of their buckets, DDP copies that one back.
"""

import torch

SLOT_PER_S = 1000.0
"""Slots count milliseconds."""


class TimeSlots:
    """Slots behind one model's last bucket: written before the all-reduce, read after it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._make_room(torch.empty(0))
        self._apart = torch.empty(0)
        self._received: _Received | None = None
        self._before: _Received | None = None

    def extend(self, bucket: torch.Tensor, scale: float, seconds_per_sample: float) -> torch.Tensor:
        """The bucket times `scale`, all zero for 0, and the slots behind it: to be summed over ranks in place."""
        if self.gradient.numel() != bucket.numel() or self.gradient.dtype != bucket.dtype:
            self._make_room(bucket)  # DDP rebuilds its buckets after the first step
        if scale:
            torch.mul(bucket, scale, out=self.gradient)
        else:
            self.gradient.zero_()  # not times zero: a dummy batch may have made it NaN
        self._slots.zero_()
        self._own.fill_(min(seconds_per_sample * SLOT_PER_S, self._largest))
        return self._buffer

    def write_apart(self, seconds_per_sample: float) -> torch.Tensor:
        """The slots by themselves, in float32: to be summed over ranks in place, where a codec has the bucket."""
        self._apart = torch.zeros(self._world_size)
        self._apart[self._rank] = seconds_per_sample * SLOT_PER_S
        return self._apart

    def receive_apart(self) -> None:
        """Take what `write_apart` returned, now summed."""
        self._received, self._before = _Received(self._apart), None

    def receive(self) -> torch.Tensor:
        """Take the slots off what was summed and return the gradient."""
        self._received = _Received(self._slots)
        return self.gradient

    def take_seconds(self) -> list[float] | None:
        """Seconds per sample by rank, 0 where unknown, at the end of a step; `None` when none came back.

        On the CPU they are this step's. On a GPU they are those of the step before, which it has done by the time that
        this one is queued: nothing is waited for that would leave it idle, and no rank can be a step ahead of another.
        """
        received, self._received = self._received, None
        if received is None or received.on_device:
            received, self._before = self._before, received
        return None if received is None else received.seconds()

    def _make_room(self, bucket: torch.Tensor) -> None:
        """A buffer for such a bucket, and the views of it that every step needs: each costs as much as an operation."""
        size = bucket.numel()
        self._buffer = bucket.new_empty(size + self._world_size)
        self.gradient, self._slots = self._buffer[:size], self._buffer[size:]
        self._own = self._slots[self._rank]
        self._largest = torch.finfo(bucket.dtype).max


class _Received:
    """Slots that came back; from a GPU on their way to the host."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.on_device = slots.is_cuda
        self._arrived: torch.cuda.Event | None = None
        self._slots = slots
        if slots.is_cuda:
            self._slots = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True).copy_(slots, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def seconds(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [milliseconds / SLOT_PER_S for milliseconds in self._slots.tolist()]
