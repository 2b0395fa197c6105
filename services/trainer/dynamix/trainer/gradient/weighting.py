"""Exact weighting: g = sum_i (b_i / B) g_i, whatever the local batch sizes (method section 5.1).

Under DDP a communication hook does it, so that the user's loss stays what it was; it also yields |g_i|^2 and |G|^2:
each is one more pass over the gradient, as the weighing itself is (docs/overhead.md), hence not on every step.
Under tracking it also carries every rank's compute time (`time_slots`). Elsewhere the loss itself is scaled
(`loss_factor`).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know

from dynamix.trainer.data.sampler import StepPlan

from .time_slots import TimeSlots

Reduction = Literal["mean", "sum"]
"""What the user's loss does over the samples of its batch."""

BaseHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook that averages over ranks, as torch's own do."""

Callback = partial[torch.Tensor]

HALF = (torch.float16, torch.bfloat16)

SETTLE_S = 1.0
"""The longest that closing waits for threads of the process group; they need microseconds."""


class GradientClock(Protocol):
    """What the hook reports of the times of a step, and what it asks for."""

    def gradient_ready(self) -> None:
        """This rank's last bucket is ready to be reduced."""

    def reduced(self) -> None:
        """A reduced bucket came back; the last one counts."""

    def seconds_per_sample(self) -> float:
        """Compute time over samples of the newest step completed and not yet returned; 0 without one."""


class SquaredNorms(NamedTuple):
    """Per bucket of one step, |g_i|^2 of this rank's mean gradient and |G|^2; on a GPU still on the device.

    Both are empty on a step that was not measured.
    """

    local: list[float | torch.Tensor]
    reduced: list[float | torch.Tensor]


NOT_MEASURED = SquaredNorms([], [])


def loss_factor(plan: StepPlan, rank: int, reduction: Reduction) -> float:
    """Factor on a rank's loss before a framework that averages gradients over all ranks."""
    counts = plan.counts
    if reduction == "mean":
        return counts.values[rank] * len(counts.values) / counts.total
    return len(counts.values) / counts.total if counts.values[rank] else 0.0


class GradientHook:
    """The communication hook of one DDP model.

    `reduce` runs in stages (`weigh`, `launch`, `finish`), which are public so that each can be timed (bench.overhead).

    Without a base hook a bucket is scaled and summed over ranks. A base hook averages: its buckets are scaled N times
    as much. A rank without samples zeroes its bucket: its dummy batch may have any gradient, and NaN * 0 is NaN.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        clock: GradientClock,
        *,
        reduction: Reduction,
        noise_every: int = 1,
        base_hook: BaseHook | None = None,
        base_state: object = None,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._clock = clock
        self._reduction = reduction
        self._base_hook = base_hook
        self._base_state = base_state
        self._noise_every = noise_every
        self._measures = False
        self._shares = False
        self._slots = TimeSlots(self._rank, dist.get_world_size(group))
        self._scale = 0.0
        self._to_mean = 0.0
        self._local: dict[int, float | torch.Tensor] = {}
        self._reduced: dict[int, float | torch.Tensor] = {}
        self._lent: WeakSet[Callback] = WeakSet()
        """Callbacks that a thread of the process group still holds."""

    def begin(self, plan: StepPlan, *, shares_times: bool = False) -> None:
        """Set the weights of the step that begins; with `shares_times` all ranks learn each other's compute times.

        That must be so on all ranks or on none, and not over a base hook: what it does with slots is not known.
        """
        assert not (shares_times and self._base_hook), "a base hook cannot carry times"
        self._shares = shares_times
        count, total = plan.counts.values[self._rank], plan.counts.total
        ranks = 1 if self._base_hook is None else len(plan.counts.values)
        self._scale = ranks * (count if self._reduction == "mean" else min(count, 1)) / total
        self._to_mean = 1.0 if self._reduction == "mean" or count == 0 else 1.0 / (count * count)
        self._measures = plan.step % self._noise_every == 0
        self._local.clear()
        self._reduced.clear()

    def take_norms(self) -> SquaredNorms:
        """The squared norms of the step that ends; empty when it was not measured or no gradient was reduced."""
        if not self._reduced:
            return NOT_MEASURED
        local, reduced = list(self._local.values()), list(self._reduced.values())
        return SquaredNorms([value * self._to_mean for value in local], reduced)

    def take_times(self) -> list[float] | None:
        """Seconds per sample by rank as the all-reduce brought them, 0 where unknown (`TimeSlots.take_seconds`)."""
        return self._slots.take_seconds()

    def reduce(
        self,
        _state: object,
        bucket: GradBucket,  # DDP passes it by this name
    ) -> torch.futures.Future[torch.Tensor]:
        """The hook itself: called by DDP for each bucket, in order, in the thread of the backward pass."""
        carries = False
        if bucket.is_last():
            self._clock.gradient_ready()
            carries = self._shares
        finish: Callback
        if self._measures:
            index, buffer = bucket.index(), bucket.buffer()
            self._local[index] = squared_norm(buffer) if self._scale else 0.0
            finish = partial(self.finish_measured, index, carries=carries)
        else:
            finish = partial(self.finish, carries=carries)
        sent = self.weigh(bucket.buffer(), carries=carries)
        return self.launch(bucket, sent).then(self._lend(finish))

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until the threads of the process group have let go of what they called.

        They take the interpreter once more to drop a callback that is done. A thread that asks for it while it is being
        taken down ends the whole process (`terminate called without an active exception`), after the last step.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._lent and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def _lend(self, callback: Callback) -> Callback:
        self._lent.add(callback)
        return callback

    def weigh(self, buffer: torch.Tensor, *, carries: bool) -> torch.Tensor:
        """First stage of `reduce`: scale the bucket; with `carries`, into a buffer with the compute times behind it."""
        if carries:
            return self._slots.extend(buffer, self._scale, self._clock.seconds_per_sample())
        return buffer.mul_(self._scale) if self._scale else buffer.zero_()

    def launch(self, bucket: GradBucket, sent: torch.Tensor) -> torch.futures.Future[Any]:
        """Second stage: start the all-reduce as DDP does; `dist.all_reduce` checks arguments first, 20 us a bucket."""
        if self._base_hook is not None:
            return self._base_hook(self._base_state, bucket)
        future: torch.futures.Future[Any] = self._group.allreduce([sent]).get_future()
        return future

    def finish(self, future: torch.futures.Future[Any], *, carries: bool) -> torch.Tensor:
        """Last stage, in a thread of the process group, while the training waits for the last bucket."""
        self._clock.reduced()
        value = future.value()
        if carries:
            return self._slots.receive()
        reduced: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
        return reduced

    def finish_measured(self, index: int, future: torch.futures.Future[Any], *, carries: bool) -> torch.Tensor:
        """Last stage of a measured step; each bucket has its own place, so no two threads touch the same."""
        reduced = self.finish(future, carries=carries)
        self._reduced[index] = squared_norm(reduced)
        return reduced


def squared_norm(gradient: torch.Tensor) -> float | torch.Tensor:
    """|gradient|^2, in float32 where half precision would overflow; a number on the CPU, on a GPU still a tensor."""
    if gradient.dtype in HALF:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squared = norm * norm
    else:
        squared = torch.dot(gradient, gradient)
    return squared if squared.is_cuda else squared.item()
