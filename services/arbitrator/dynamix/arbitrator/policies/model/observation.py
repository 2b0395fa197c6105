"""The observation of a policy: columns and values by the names of the state's features, and the last known B_noise."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.windows import MAX_STRETCH

_GROWTH = 1.1
_MOST = 4.0

Array32 = npt.NDArray[np.float32]
Array64 = npt.NDArray[np.float64]


def column(obs_WF: Array32, name: str) -> Array64:
    """One feature of all ranks as float64, NaN where unknown."""
    return obs_WF[:, RANK_INDEX[name]].astype(np.float64)


def job_value(global_F: Array32, name: str) -> float:
    """One feature of the job, NaN when unknown."""
    return float(global_F[GLOBAL_INDEX[name]])


def steps_of(job: Job, global_F: Array32) -> int:
    """Optimizer steps of the window: the job's `window_steps`, or several times as many."""
    stretch = job_value(global_F, "stretch")
    return job.window_steps * (round(stretch) if 1 <= stretch <= MAX_STRETCH else 1)


def decided_sizes(obs_WF: Array32) -> tuple[int, ...]:
    """The arbitrator's own last decision, which every delta is relative to."""
    return tuple(obs_WF[:, RANK_INDEX["decided_local_batch_size"]].astype(np.int64).tolist())


class NoiseMemory(NamedTuple):
    """The last known B_noise, and for how many windows it has been masked since."""

    last_known: float = math.nan
    """NaN before the first: never measured is no reason to change anything."""
    num_masked: int = 0

    def observe(self, noise_scale: float) -> "NoiseMemory":
        """The memory after a window whose B_noise is NaN when masked."""
        if 0 < noise_scale < math.inf:
            return NoiseMemory(noise_scale)
        return self._replace(num_masked=self.num_masked + 1)

    @property
    def noise_scale(self) -> float:
        """B_noise in samples, NaN when never known.

        It is masked when the smoothed |G_true|^2 is not positive: the noise scale is then beyond what batches of this
        size can measure, so the last known one is taken as too small, by 10 % more per window, at most by a factor 4.
        """
        return self.last_known * min(_MOST, _GROWTH ** min(self.num_masked, 100))
