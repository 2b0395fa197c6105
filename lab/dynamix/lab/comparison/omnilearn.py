"""OmniLearn's controller, a baseline that is not a policy of the product.

Written from the published description (Tyagi and Sharma, arXiv 2503.17469): a proportional controller whose error is
the distance of a rank's compute time from the mean, b_i <- b_i mean(t) / t_i, on smoothed times, with a dead band and a
constant global batch. Since b_i / t_i is rank i's throughput, that is a split by smoothed throughput. A size changes
only together with all others, when any would move by more than the dead band; then the smoothing begins again.
"""

from typing import ClassVar

import numpy as np

from dynamix.arbitrator.policies.policy import Array32, Decision, column, decided_sizes, option
from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import Option, Options


class OmniLearn:
    """Equalises the ranks' compute times at the job's own global batch."""

    name = "omnilearn"
    version = 1
    options: ClassVar[Options] = {
        "smoothing": Option(0.5, 0.01, 1, "weight of the newest throughput in the moving average"),
        "dead_band": Option(0.05, 0, 1, "relative change of any size from which all are set again"),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """Sizes in proportion to throughput, once one is off by the dead band; unchanged until every rank is known."""
        current = decided_sizes(obs_WF)
        samples, times_s = column(obs_WF, "num_samples"), column(obs_WF, "compute_time_s")
        is_known = (column(obs_WF, "age_windows") == 0) & (samples > 0) & (times_s > 0)
        newest = np.divide(samples, times_s, out=np.full_like(samples, np.nan), where=is_known)
        before = np.full(job.world_size, np.nan)
        if len(carry) == 4 * job.world_size:
            before = np.frombuffer(carry, dtype="<f4").astype(np.float64)
        average = before + option(self.options, job, "smoothing") * (newest - before)
        throughput = np.where(np.isnan(newest), before, np.where(np.isnan(before), newest, average))
        unchanged = Decision(Allocation(current), carry=throughput.astype("<f4").tobytes())
        if np.isnan(throughput).any():
            return unchanged
        upper = job.max_local_batch_sizes
        lower = [min(job.min_local_batch_size, most) for most in upper]
        wanted = apportion(sum(job.initial_local_batch_sizes), throughput, lower, upper)
        moved = np.abs(np.subtract(wanted, current)) / np.maximum(current, 1)
        is_small = float(moved.max()) <= option(self.options, job, "dead_band")
        return unchanged if is_small else Decision(Allocation(wanted))
