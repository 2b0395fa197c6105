"""What AdaptDL would have measured of a job, from the windows that DYNAMIX observes.

Its profile (adaptdl/torch/_metrics.py) sums, for each local batch size, the time of rank 0's steps and what of it was
synchronisation: from the rank's last gradient to the end of the all-reduce, so that waiting for slower ranks is in it.
Our `step_time_s` and `sync_time_s` are these. Nothing is ever forgotten.

Its gradient statistics (adaptdl/torch/gradient_noise_scale.py) are sqr = |G|^2 and var = S / B_0, the variance of a
gradient of the initial global batch B_0. Only their ratio enters its efficiency, and that is B_noise / B_0.
"""

import math

import msgspec
import numpy as np

from dynamix.arbitrator.policies.model.observation import Array32, Array64, column, job_value
from dynamix.schemas.messages import Job


class SizeTimes(msgspec.Struct, frozen=True, array_like=True):
    """Sums over the steps with one local batch size."""

    num_steps: int = 0
    step_s: float = 0.0
    sync_s: float = 0.0

    def plus(self, other: "SizeTimes") -> "SizeTimes":
        """Both together."""
        return SizeTimes(self.num_steps + other.num_steps, self.step_s + other.step_s, self.sync_s + other.sync_s)


class FitArguments(msgspec.Struct, frozen=True):
    """The profile as `adaptdl.goodput.fit_perf_params` takes it: one number per local batch size."""

    local_batch_sizes: Array64
    accumulation_step_s: Array64
    """Mean time of a step without its synchronisation: what a step that only accumulates would take."""
    step_s: Array64


class Profile(msgspec.Struct, frozen=True):
    """What is remembered from window to window."""

    times: dict[int, SizeTimes] = {}
    """By local batch size."""
    noise_scale: float | None = None
    """The last known B_noise."""
    parameters: tuple[float, ...] = ()
    """Parameters of AdaptDL's step-time model, as it was fitted last; empty before."""
    windows_since_fit: int = 0

    def observe(self, job: Job, obs_WF: Array32, global_F: Array32, *, slowest: bool) -> "Profile":
        """Add a window: the times of rank 0, or of the rank that computed longest. What is not known is left out."""
        rank = _longest(obs_WF) if slowest else 0
        step_s, sync_s = (float(column(obs_WF, name)[rank]) for name in ("step_time_s", "sync_time_s"))
        total, noise_scale = job_value(global_F, "global_batch_size"), job_value(global_F, "noise_scale")
        times = dict(self.times)
        if column(obs_WF, "age_windows")[rank] == 0 and 0 <= sync_s < step_s < math.inf and total > 0:
            steps = job.window_steps
            size = local_batch_size(job, total)
            times[size] = times.get(size, SizeTimes()).plus(SizeTimes(steps, steps * step_s, steps * sync_s))
        return msgspec.structs.replace(
            self,
            times=times,
            noise_scale=noise_scale if 0 < noise_scale < math.inf else self.noise_scale,
            windows_since_fit=self.windows_since_fit + 1,
        )

    def fitted(self, parameters: tuple[float, ...]) -> "Profile":
        """The same with parameters that were fitted now."""
        return msgspec.structs.replace(self, parameters=parameters, windows_since_fit=0)

    def fit_arguments(self) -> FitArguments:
        """Mean times by local batch size."""
        num_steps, step_s, sync_s = (
            np.array([getattr(times, name) for times in self.times.values()], dtype=np.float64)
            for name in SizeTimes.__struct_fields__
        )
        sizes = np.array(list(self.times), dtype=np.float64)
        return FitArguments(sizes, (step_s - sync_s) / num_steps, step_s / num_steps)

    def pack(self) -> bytes:
        """The bytes that the carry holds."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, carry: bytes) -> "Profile":
        """What `pack` gave; empty at the start of a generation."""
        return msgspec.msgpack.decode(carry, type=cls) if carry else cls()


def local_batch_size(job: Job, global_batch_size: float) -> int:
    """The size of every rank, as AdaptDL divides: equally, rounded up."""
    return math.ceil(global_batch_size / job.world_size)


def gradient_statistics(noise_scale: float, initial_global_batch_size: int) -> tuple[float, float]:
    """AdaptDL's sqr and var of the gradient, in units of |G|^2."""
    return 1.0, noise_scale / initial_global_batch_size


def _longest(obs_WF: Array32) -> int:
    compute_s = column(obs_WF, "compute_time_s")
    return int(np.argmax(np.where(np.isnan(compute_s), -1.0, compute_s)))
