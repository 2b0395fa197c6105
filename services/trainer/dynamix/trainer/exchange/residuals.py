"""Residuals: what a rank has not sent yet of its gradients, kept by parameter and laid out as buckets are.

DDP makes its buckets again after the first step, and a checkpoint knows no buckets at all, so a residual belongs to its
parameter. Within a bucket residuals lie behind each other, as the gradients do: adding them is one operation.

Those that a step began with are kept until the next one begins: an optimizer that skips the step, as under a gradient
scaler, throws away what was sent in it, and with it what the residuals gave.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .codec import BucketPart, BucketView, Member
from .collectives import Leg
from .owners import sum_over_ranks


class Residuals:
    """One flat residual per parameter, zero where nothing is known."""

    def __init__(self) -> None:
        self._by_key: dict[str, Tensor] = {}
        self._laid_out: dict[int, tuple[tuple[BucketPart, ...], Tensor]] = {}
        self._before: dict[str, Tensor] = {}
        """By key, when the step began; nothing here changes a tensor, but `scale` between steps."""

    def of(self, bucket: BucketView) -> Tensor:
        """The residuals of a bucket, in its layout; not to be changed.

        Raises:
            ValueError: when a parameter has another size than before.
        """
        parts, flat = self._laid_out.get(bucket.number, (None, None))
        if flat is not None and (parts is bucket.parts or parts == bucket.parts) and flat.device == bucket.flat.device:
            return flat
        if flat is not None:
            self._laid_out.clear()  # all buckets are made again: one of the old layout would keep a dead copy
        flat = bucket.flat.new_zeros(len(bucket.flat), dtype=residual_type(bucket.flat.dtype))
        for part in bucket.parts:
            place = flat[part.start : part.stop]
            known = self._by_key.get(part.key)
            if known is not None:
                if known.shape != place.shape:
                    raise ValueError(
                        f"the residual of {part.key} has {len(known)} numbers, the parameter {len(place)}: it is of "
                        "another model; load a checkpoint of this one, or none"
                    )
                place.copy_(known)
            self._by_key[part.key] = place
        self._laid_out[bucket.number] = (bucket.parts, flat)
        return flat

    def put(self, bucket: BucketView, flat: Tensor) -> None:
        """Keep these from now on, instead of what `of` returned."""
        self._laid_out[bucket.number] = (bucket.parts, flat)
        self._by_key.update((part.key, flat[part.start : part.stop]) for part in bucket.parts)

    def begin_step(self) -> None:
        """Let `undo_step` go back to what is kept now."""
        self._before = dict(self._by_key)

    def undo_step(self) -> None:
        """Keep again what was kept when the step began."""
        self._by_key = dict(self._before)
        self._laid_out.clear()

    def scale(self, factor: float) -> None:
        """Multiply all, in place."""
        for each in self._by_key.values():
            each.mul_(factor)

    def flush(self, bucket: BucketView, member: Member) -> Leg:
        """Sum a bucket without loss, and its residuals with it; then there are none."""
        residual = self.of(bucket)
        bucket.flat.add_(residual)
        yield from sum_over_ranks(bucket.flat, member)
        self.put(bucket, torch.zeros_like(residual))

    def by_key(self) -> dict[str, Tensor]:
        """All, by parameter's key, as views."""
        return dict(self._by_key)

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Forget what is kept, and begin with copies of these."""
        self._laid_out.clear()
        self._before.clear()
        self._by_key = {key: each.detach().flatten().clone() for key, each in residuals.items()}


class ErrorFeedback:
    """What `RevocableCodec` asks of a codec's residuals, for codecs that derive from it and write only `reduce`."""

    def __init__(self) -> None:
        self._residuals = Residuals()

    def residuals(self) -> dict[str, Tensor]:
        """What the sums lack so far, by parameter's key."""
        return self._residuals.by_key()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Begin with these instead."""
        self._residuals.load(residuals)

    def flush(self, bucket: BucketView, member: Member) -> Leg:
        """Send the bucket without loss, and the residuals with it."""
        yield from self._residuals.flush(bucket, member)

    def begin_step(self) -> None:
        """Keep what residuals are now, for `undo_step`."""
        self._residuals.begin_step()

    def undo_step(self) -> None:
        """Have the residuals again that the newest step began with."""
        self._residuals.undo_step()

    def scale_residuals(self, factor: float) -> None:
        """Multiply all residuals."""
        self._residuals.scale(factor)


def residual_type(gradient_type: torch.dtype) -> torch.dtype:
    """The type of the residuals and sums of a bucket: float64 for float64, else float32."""
    return torch.float64 if gradient_type == torch.float64 else torch.float32
