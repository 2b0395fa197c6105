"""Baselines that only the laboratory has, beside the policies of the product: OmniLearn's controller.

`omnilearn` was written from the published description (Tyagi and Sharma, arXiv 2503.17469): a proportional controller
whose error is the distance of a worker's computing time from the mean, b_i <- b_i mean(t) / t_i, on smoothed times,
with a dead band and a constant global batch. Since b_i / t_i is worker i's throughput, that is a split by smoothed
throughput. A size is only changed with all others, when any would move by more than the dead band; after a change the
smoothing begins again.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from dynamix.arbitrator.policies.model.observation import Array32, Array64, column, decided_sizes
from dynamix.arbitrator.policies.options import Option, Options, option
from dynamix.arbitrator.policies.policy import Decision, NamedPolicy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation


class OmniLearn:
    """Equalises the workers' computing times at the job's own global batch."""

    name = "omnilearn"
    version = 1
    options: ClassVar[Options] = {
        "smoothing": Option(0.5, 0.01, 1, "weight of the newest throughput in the moving average"),
        "dead_band": Option(0.05, 0, 1, "relative change of any size from which all are set again"),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """Sizes in proportion to throughput, once one is off by the dead band; before every rank is known, as it is."""
        current = decided_sizes(obs_WF)
        smoothing = option(self.options, job, "smoothing")
        throughput = _smoothed(_unpack(carry, job.world_size), _measured(obs_WF), smoothing)
        if np.isnan(throughput).any():
            return Decision(Allocation(current), carry=_pack(throughput))
        upper = job.max_local_batch_sizes
        lower = [min(job.min_local_batch_size, most) for most in upper]
        wanted = apportion(sum(job.initial_local_batch_sizes), throughput, lower, upper)
        moved = np.abs(np.subtract(wanted, current)) / np.maximum(current, 1)
        if float(moved.max()) <= option(self.options, job, "dead_band"):
            return Decision(Allocation(current), carry=_pack(throughput))
        return Decision(Allocation(wanted))


LABORATORY: Mapping[str, NamedPolicy] = {policy.name: policy for policy in (OmniLearn(),)}


def known_policy(name: str) -> NamedPolicy:
    """The baseline or policy of that name; raises as `policy_named`."""
    return LABORATORY.get(name) or policy_named(name)


def _measured(obs_WF: Array32) -> Array64:
    """Throughput of computing by rank, all in the same unit; NaN for a stale row and for a rank without samples."""
    samples, times_s = column(obs_WF, "num_samples"), column(obs_WF, "compute_time_s")
    is_known = (column(obs_WF, "age_windows") == 0) & (samples > 0) & (times_s > 0)
    return np.divide(samples, times_s, out=np.full_like(samples, np.nan), where=is_known)


def _smoothed(previous: Array64, newest: Array64, smoothing: float) -> Array64:
    """The moving average; where only one of both is known, that one."""
    average = previous + smoothing * (newest - previous)
    return np.where(np.isnan(newest), previous, np.where(np.isnan(previous), newest, average))


def _pack(throughput: Array64) -> bytes:
    return throughput.astype("<f4").tobytes()


def _unpack(carry: bytes, world_size: int) -> Array64:
    if len(carry) != 4 * world_size:
        return np.full(world_size, np.nan)
    return np.frombuffer(carry, dtype="<f4").astype(np.float64)
