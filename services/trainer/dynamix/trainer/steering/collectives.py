"""The collectives of the job: on a gloo group of their own, so that they never mix with the user's.

Its time-out is that of the script's default group: torch would give it half an hour, whatever the script said. A single
process needs no default group.

Two per window, a few hundred bytes each: one gather at its end, one broadcast `margin` steps before the next boundary.
Where agents leave traces, a sum of numbers goes out beside the broadcast.
Both are posted at the end of one step and taken at the end of the next, when they are long done: no rank waits for the
slowest where it would not have waited anyway. They are the group's own methods: those of torch.distributed check their
arguments first, 0.1 ms in a process that has just trained.
"""

import contextlib
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo  # public, missing in the stubs of dist

from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.orders import Order
from dynamix.trainer.exchange.transport import LentTensor, keep_for_ever, timeout_of

T = TypeVar("T")

SOLO_TIMEOUT = timedelta(minutes=30)
LENGTH_BYTES = 4
HEAD_BYTES = 256
SIZE_BYTES = 18
"""Most bytes of a broadcast decision: 9 each per size and share in msgpack, and room for every other lever."""

ROW_BYTES = 640
"""Most bytes of a row: some forty numbers of 9 bytes, and the names of the noise's sums."""

_decisions: msgspec.msgpack.Decoder[Allocation | None] = msgspec.msgpack.Decoder(Allocation | None)
"""Made once: to make one takes longer than to decode."""


def _write(lent: LentTensor, value: object) -> None:
    packed = msgspec.msgpack.encode(value)
    packed = len(packed).to_bytes(LENGTH_BYTES) + packed
    lent.tensor[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _read(lent: LentTensor) -> bytes:
    padded = lent.tensor.numpy().tobytes()
    length = int.from_bytes(padded[:LENGTH_BYTES])  # what follows is of earlier, longer values
    return padded[LENGTH_BYTES : LENGTH_BYTES + length]


class Collectives:
    """All ranks must call the same methods in the same order."""

    def __init__(self, group: Any = None) -> None:
        """Use a `group` that someone else makes and ends, or make one of all ranks, a collective."""
        self.rank, self.world_size = 0, 1
        self._group: Any = group
        """A process group, until this rank leaves it."""
        self._is_ours = group is None
        if group is not None:
            self.rank, self.world_size = group.rank(), group.size()
        elif (whole := dist.group.WORLD) is None:
            self._group = ProcessGroupGloo(HashStore(), 0, 1, SOLO_TIMEOUT)
        else:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(whole))
        self._rows = [LentTensor(torch.zeros(ROW_BYTES, dtype=torch.uint8)) for _ in range(self.world_size)]
        self._mine = LentTensor(torch.zeros(ROW_BYTES, dtype=torch.uint8))
        self._decision = LentTensor(torch.zeros(HEAD_BYTES + SIZE_BYTES * self.world_size, dtype=torch.uint8))
        self._under_way: dict[str, dist.Work] = {}
        """Collectives that were posted and not taken yet."""
        self._total = LentTensor(torch.zeros(1, dtype=torch.int64))
        self._order: LentTensor
        self._numbers = LentTensor(torch.zeros(0, dtype=torch.float64))

    def close(self) -> None:
        """Leave the group, if nothing is under way in it: its threads and connections end. No collective.

        Where something is, as after an error, waiting for the threads would be waiting for other ranks: the group is
        left to the end of the process.
        """
        group, self._group = self._group, None
        if group is None or not self._is_ours:
            return
        if all(work.is_completed() for work in self._under_way.values()):
            with contextlib.suppress(ValueError):  # destroyed with all others by the script, or of a single process
                dist.destroy_process_group(group)
        else:
            keep_for_ever(group)

    def post_row(self, row: msgspec.Struct) -> None:
        """Send this rank's row to all others."""
        _write(self._mine, row)
        self._under_way["rows"] = self._group.allgather([each.alias for each in self._rows], self._mine.alias)

    def take_rows(self, decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        """The rows of all ranks, in rank order, as they were posted last."""
        self._under_way.pop("rows").wait()
        return [decoder.decode(_read(each)) for each in self._rows]

    def post_decision(self, decision: Allocation | None) -> None:
        """Send rank 0's decision, or none, to all ranks."""
        if self.rank == 0:
            _write(self._decision, decision)
        self._under_way["decision"] = self._group.broadcast(self._decision.alias, 0)

    def take_decision(self) -> Allocation | None:
        """Rank 0's decision as it was posted last."""
        self._under_way.pop("decision").wait()
        return _decisions.decode(_read(self._decision))

    def post_numbers(self, mine: Sequence[float]) -> None:
        """Send float64 to be summed over all ranks, each place on its own; all ranks send as many."""
        if len(mine) != self._numbers.tensor.numel():
            self._numbers = LentTensor(torch.zeros(len(mine), dtype=torch.float64))
        self._numbers.tensor.numpy()[:] = mine
        self._under_way["numbers"] = self._group.allreduce([self._numbers.alias])

    def take_numbers(self) -> list[float]:
        """The sums, as they were posted last: exact where at most one rank sent anything but 0."""
        self._under_way.pop("numbers").wait()
        return self._numbers.tensor.tolist()

    def share_order(self, order: Order, *, waits: bool = True) -> Order:
        """Receive rank 0's order; the others pass one as long. A rank that does not wait does so at the next call."""
        if "order" in self._under_way:
            self._under_way["order"].wait()
        self._order = LentTensor(torch.from_numpy(order))
        self._under_way["order"] = self._group.broadcast(self._order.alias, 0)
        if waits:
            self._under_way["order"].wait()
        return order

    def post_total(self, mine: int) -> Callable[[], int]:
        """Begin to add up a number over all ranks; call what is returned for the sum."""
        self._total.tensor.fill_(mine)
        work = self._group.allreduce([self._total.alias])

        def total() -> int:
            work.wait()
            return int(self._total.tensor.item())

        return total

    def gather_objects(self, mine: T, *, within_s: float | None = None) -> list[T]:
        """Gather one object from each rank, in rank order: for attaching, not for steps.

        Raises:
            RuntimeError: when another rank does not come within the time, if one is given.
        """
        payload = pickle.dumps(mine)
        sizes = self._gather_now(torch.tensor([len(payload)]), within_s)
        padded = bytearray(payload).ljust(max(int(size) for size in sizes), b"\0")
        found = self._gather_now(torch.frombuffer(padded, dtype=torch.uint8))
        return [pickle.loads(each.numpy().tobytes()) for each in found]  # noqa: S301 - from the ranks of this job

    def _gather_now(self, mine: torch.Tensor, within_s: float | None = None) -> list[torch.Tensor]:
        """Such a tensor of each rank; all have one size."""
        found = [LentTensor(torch.empty_like(mine)) for _ in range(self.world_size)]
        lent = LentTensor(mine)
        work = self._group.allgather([each.alias for each in found], lent.alias)
        work.wait() if within_s is None else work.wait(timedelta(seconds=within_s))
        return [each.tensor for each in found]
