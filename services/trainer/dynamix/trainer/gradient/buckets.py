"""Buckets: the parts of a model's gradient that DDP hands to its communication hook, from weighing to the sum."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know

from dynamix.trainer.communication.lent_tensors import LentTensor
from dynamix.trainer.data.plan import Counts
from dynamix.trainer.exchange.codec import BucketPart, BucketView

from .noise import HALF, NormSketch


class SquaredNorms(NamedTuple):
    """Per bucket of one step, |g_i|^2 of this rank's mean gradient and |G|^2; on a GPU still on the device.

    Both are empty on a step that was not measured.
    """

    local: list[float | torch.Tensor]
    reduced: list[float | torch.Tensor]
    counts: Counts | None = None
    """Sizes of the step that they are of, where that is not the step which they were known after."""


NOT_MEASURED = SquaredNorms([], [])


class StepSketches(NamedTuple):
    """The sketches of one local step, by model, until their cells are summed."""

    sketches: list[NormSketch]
    counts: Counts
    """Sizes of the step."""
    over_mean: float
    """`StepWeights.over_mean` of the step."""

    def norms(self) -> SquaredNorms:
        """The squared norms, once the cells are summed."""
        squared = self.over_mean**2 or 1.0
        local: list[float | torch.Tensor] = [each.local / squared for each in self.sketches]
        return SquaredNorms(local, [each.reduced() / squared for each in self.sketches], self.counts)


class ModelBucket:
    """One of the model's buckets, and all that is the same for it in every step: half of what it costs is paid once."""

    __slots__ = ("buffer", "encoded", "factor", "lent", "reduced", "result", "scale", "view")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.scale = 0.0
        """What `factor` holds. As a tensor it saves torch a third of what scaling a small bucket takes."""
        self.factor = torch.zeros((), dtype=torch.float64 if buffer.dtype == torch.float64 else torch.float32)
        self.encoded: torch.Tensor | None = None
        """What the process group reduces; the rest belongs to it."""
        self.lent: LentTensor | None = None
        self.result = buffer
        """Where the reduced gradient is in the end."""
        self.reduced: torch.futures.Future[torch.Tensor] | None = None
        """What DDP waits for, done from the beginning: it looks at it after the last bucket's hook, which waits for
        all. `None` on a GPU, where a future tells whose streams wait for which, and over base hooks."""
        self.view: BucketView | None = None
        """What a codec gets of it, once one did."""

    def weigh(self, scale: float) -> torch.Tensor:
        """Scale the bucket in place."""
        if not scale:
            return self.buffer.zero_()  # not times zero: a dummy batch may have made it NaN
        if scale != self.scale:
            self.scale = scale
            self.factor.fill_(scale)
        return self.buffer.mul_(self.factor)

    def lend(self, encoded: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """An alias of `encoded` for a process group that reduces it."""
        if self.lent is None or self.encoded is not encoded:
            self.encoded, self.lent, self.result = encoded, LentTensor(encoded), result
            self._complete(result)
        return self.lent.alias

    def stay(self) -> None:
        """Have the reduced gradient in place, without a process group that gets the bucket itself."""
        if self.reduced is None or self.result is not self.buffer:
            self.encoded = self.lent = None
            self.result = self.buffer
            self._complete(self.buffer)

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future of its own for one step: on a GPU its streams wait for it, not the training thread."""
        return torch.futures.Future(devices=[self.buffer.device] if self.buffer.is_cuda else None)

    def _complete(self, result: torch.Tensor) -> None:
        self.reduced = None
        if not self.buffer.is_cuda:
            self.reduced = torch.futures.Future()
            self.reduced.set_result(result)


class Waitable(Protocol):
    """Something that takes its time."""

    def wait(self) -> Any:
        """Wait for it, and return what it brought, if anything."""


class Arrived:
    """What needs no waiting."""

    def wait(self) -> None:
        """Return at once."""


class SentBucket(NamedTuple):
    """A bucket on its way."""

    number: int
    bucket: ModelBucket
    under_way: Waitable
    reduced: torch.futures.Future[torch.Tensor]


def view_of(bucket: GradBucket, buffer: torch.Tensor, keys: Mapping[torch.Tensor, str]) -> BucketView:
    """What a codec gets: where each parameter's gradient lies; those whose rows are not in one piece have none."""
    parts = []
    for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        start = int(part.storage_offset() - buffer.storage_offset())
        has_rows = part.dim() > 1 and part.stride(0) * part.size(0) == part.numel()
        shape = part.shape if has_rows else torch.Size([part.numel()])
        parts.append(BucketPart(keys[parameter], start, start + part.numel(), shape))
    return BucketView(bucket.index(), buffer, tuple(parts))


def squared_norm(gradient: torch.Tensor) -> float | torch.Tensor:
    """|gradient|^2, in float32 where half precision would overflow; a number on the CPU, on a GPU still a tensor."""
    if gradient.dtype in HALF:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squared = norm * norm
    else:
        squared = torch.dot(gradient, gradient)
    return squared if squared.is_cuda else squared.item()
