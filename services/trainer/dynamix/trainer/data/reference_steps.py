"""Reference steps: how far a run is, counted in steps of the global batch that the script was written for.

Schedules and stops that count optimizer steps mean samples: while the global batch changes, a step is more or less than
one reference step. An epoch has as many as plain training has steps, its last one may be short.
"""

from typing import NamedTuple

from .sampler import Position


class ReferenceSteps(NamedTuple):
    """Reference steps of one job."""

    num_samples: int
    """Samples or tokens of an epoch, as in batch sizes; 0 where a stream does not say."""
    global_batch_size: int
    """What the script was written for."""
    drop_last: bool

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch in plain training.

        Raises:
            TypeError: when the length of an epoch is not known.
        """
        if not self.num_samples:
            raise TypeError("the stream has no length: give its class a __len__, or stop by session.progress")
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return max(whole, 1) if self.drop_last or rest == 0 else whole + 1

    def before(self, position: Position) -> float:
        """Reference steps from the beginning of the run to a position, in parts of one."""
        if not self.num_samples:
            return position.samples_seen / self.global_batch_size
        if position.offset >= self.num_samples:
            return float((position.epoch + 1) * self.per_epoch)
        return position.epoch * self.per_epoch + min(position.offset / self.global_batch_size, self.per_epoch)
