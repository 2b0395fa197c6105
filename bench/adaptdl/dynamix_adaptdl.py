"""`adaptdl`: the global batch that AdaptDL's published code chooses (petuum/adaptdl 0.2.11; Qiao et al., OSDI 2021).

A policy for benchmarks, not of the product; nothing of AdaptDL is copied. Its own functions fit the step-time model
and compare 50 global batches; as its data loader does, a change must promise 5 % more goodput, and the batch never goes
below the initial one. All ranks get the same size, within the job's bounds; with `track` the training processes divide
the sum instead.

What is not AdaptDL's: it decides once per window instead of at the start of an epoch, and fits as soon as a new size
was measured and every tenth window instead of every 30 s, which both favour it here. B_noise is DYNAMIX's average, and
the learning rate follows the job's rule, as for all policies, instead of AdaScale.
"""

import math
from typing import ClassVar
from unittest.mock import patch

import msgspec
import numpy as np
from adaptdl.goodput import GoodputFunction, fit_perf_params

from dynamix.arbitrator.policies.policy import (
    Array32,
    Decision,
    allocation_of,
    column,
    decided_sizes,
    job_value,
    option,
)
from dynamix.schemas.messages import Job
from dynamix.schemas.policies import Options, switch, track

SPEEDUP = 1.05
"""Goodput that a change must promise, relative to that of the current size (adaptdl/torch/data.py)."""
REFIT_WINDOWS = 10


class Profile(msgspec.Struct, frozen=True):
    """AdaptDL's profile, from window to window; nothing is ever forgotten.

    Its profile (adaptdl/torch/_metrics.py) sums, for each local batch size, the time of rank 0's steps and what of it
    was synchronisation: from the rank's last gradient to the end of the all-reduce, so that waiting for slower ranks is
    in it. Our `step_time_s` and `sync_time_s` are these.
    """

    times: dict[int, tuple[int, float, float]] = {}
    """By local batch size: steps, seconds of them, and seconds of their synchronisation."""
    noise_scale: float | None = None
    """The last known B_noise."""
    parameters: tuple[float, ...] = ()
    """Parameters of AdaptDL's step-time model, as it was fitted last; empty before."""
    windows_since_fit: int = 0


def _observed(before: Profile, job: Job, obs_WF: Array32, global_F: Array32, *, slowest: bool) -> Profile:
    """Add a window: the times of rank 0, or of the rank that computed longest. What is not known is left out."""
    compute_s = column(obs_WF, "compute_time_s")
    rank = int(np.argmax(np.where(np.isnan(compute_s), -1.0, compute_s))) if slowest else 0
    step_s, sync_s = (float(column(obs_WF, name)[rank]) for name in ("step_time_s", "sync_time_s"))
    total, noise_scale = job_value(global_F, "global_batch_size"), job_value(global_F, "noise_scale")
    times = dict(before.times)
    if column(obs_WF, "age_windows")[rank] == 0 and 0 <= sync_s < step_s < math.inf and total > 0:
        steps, size = job.window_steps, math.ceil(total / job.world_size)
        known = times.get(size, (0, 0.0, 0.0))
        times[size] = (known[0] + steps, known[1] + steps * step_s, known[2] + steps * sync_s)
    return Profile(
        times,
        noise_scale if 0 < noise_scale < math.inf else before.noise_scale,
        before.parameters,
        before.windows_since_fit + 1,
    )


class AdaptDl:
    """Chooses the size of the greatest goodput by AdaptDL's code."""

    name = "adaptdl"
    version = 1
    options: ClassVar[Options] = {
        "slowest": switch(0, "1: the times of the rank that computes longest; 0: those of rank 0, as AdaptDL has them"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The best size, if it is enough better than the current one. Before times and B_noise are known, as it is."""
        before = msgspec.msgpack.decode(carry, type=Profile) if carry else Profile()
        profile = _observed(before, job, obs_WF, global_F, slowest=option(self.options, job, "slowest") == 1)
        if len(profile.times) > len(before.times) or (profile.times and profile.windows_since_fit >= REFIT_WINDOWS):
            profile = msgspec.structs.replace(profile, parameters=_fitted(job, profile), windows_since_fit=0)
        sizes = decided_sizes(obs_WF)
        if profile.parameters and profile.noise_scale is not None:
            sizes = _chosen(job, profile.parameters, profile.noise_scale, sizes)
        return Decision(allocation_of(self.options, job, sizes), carry=msgspec.msgpack.encode(profile))


def _fitted(job: Job, profile: Profile) -> tuple[float, ...]:
    num_steps, step_s, sync_s = np.array(list(profile.times.values()), dtype=np.float64).T
    same, sizes = np.ones(len(step_s), dtype=np.int64), np.array(list(profile.times), dtype=np.float64)
    accumulation_s = (step_s - sync_s) / num_steps  # what a step that only accumulates would take
    found = fit_perf_params(*(len(job.nodes) * same, job.world_size * same, sizes, accumulation_s, step_s / num_steps))
    return tuple(map(float, found))


def _chosen(job: Job, parameters: tuple[float, ...], noise_scale: float, current: tuple[int, ...]) -> tuple[int, ...]:
    """Its gradient statistics are sqr = |G|^2 and var = S / B_0; only their ratio counts, which is B_noise / B_0."""
    initial = sum(job.initial_local_batch_sizes)
    low, high = job.min_local_batch_size, min(job.max_local_batch_sizes)
    goodput = GoodputFunction(parameters, (1.0, noise_scale / initial), initial)
    place = len(job.nodes), job.world_size
    with patch.object(np, "int", int, create=True):  # numpy has had none since 1.24, and `optimize` asks for it
        best, size, _ = goodput.optimize(
            *place, max_batch_size=max(initial, job.world_size * high), atomic_bsz_range=(low, high)
        )
    now = goodput(*place, math.ceil(max(sum(current), initial) / job.world_size), 0)
    return (size,) * job.world_size if best > SPEEDUP * now else current
