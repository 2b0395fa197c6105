"""`adaptdl`: the global batch that AdaptDL's published code chooses (petuum/adaptdl 0.2.11; Qiao et al., OSDI 2021).

Its own functions fit the step-time model and compare 50 global batches; as its data loader does, a change must promise
5 % more goodput, and the batch never goes below the initial one. All ranks get the same size, within the job's bounds;
with `track` the training processes divide the sum instead.

What is not AdaptDL's: it decides once per window instead of at the start of an epoch, and fits as soon as a new size
was measured and every tenth window instead of every 30 s, which both favour it here. B_noise is DYNAMIX's average, and
the learning rate follows the job's rule, as for all policies, instead of AdaScale.
"""

from typing import ClassVar
from unittest.mock import patch

import numpy as np
from adaptdl.goodput import GoodputFunction, fit_perf_params

from dynamix.arbitrator.policies.model.observation import Array32, decided_sizes
from dynamix.arbitrator.policies.options import Options, allocation_of, option, switch, track
from dynamix.arbitrator.policies.policy import Decision
from dynamix.schemas.messages import Job

from .profile import Profile, gradient_statistics, local_batch_size

SPEEDUP = 1.05
"""Goodput that a change must promise, relative to that of the current size (adaptdl/torch/data.py)."""
REFIT_WINDOWS = 10


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
        before = Profile.unpack(carry)
        slowest = option(self.options, job, "slowest") == 1
        profile = before.observe(job, obs_WF, global_F, slowest=slowest)
        if len(profile.times) > len(before.times) or (profile.times and profile.windows_since_fit >= REFIT_WINDOWS):
            profile = profile.fitted(_fitted(job, profile))
        sizes = decided_sizes(obs_WF)
        if profile.parameters and profile.noise_scale is not None:
            sizes = _chosen(job, profile.parameters, profile.noise_scale, sizes)
        return Decision(allocation_of(self.options, job, sizes), carry=profile.pack())


def _fitted(job: Job, profile: Profile) -> tuple[float, ...]:
    measured = profile.fit_arguments()
    same = np.ones(len(measured.step_s), dtype=np.int64)
    parameters = fit_perf_params(
        len(job.nodes) * same,
        job.world_size * same,
        measured.local_batch_sizes,
        measured.accumulation_step_s,
        measured.step_s,
    )
    return tuple(map(float, parameters))


def _chosen(job: Job, parameters: tuple[float, ...], noise_scale: float, current: tuple[int, ...]) -> tuple[int, ...]:
    initial = sum(job.initial_local_batch_sizes)
    low, high = job.min_local_batch_size, min(job.max_local_batch_sizes)
    goodput = GoodputFunction(parameters, gradient_statistics(noise_scale, initial), initial)
    place = len(job.nodes), job.world_size
    with patch.object(np, "int", int, create=True):  # numpy has had none since 1.24, and `optimize` asks for it
        best, size, _ = goodput.optimize(
            *place, max_batch_size=max(initial, job.world_size * high), atomic_bsz_range=(low, high)
        )
    now = goodput(*place, max(local_batch_size(job, sum(current)), local_batch_size(job, initial)), 0)
    return (size,) * job.world_size if best > SPEEDUP * now else current
