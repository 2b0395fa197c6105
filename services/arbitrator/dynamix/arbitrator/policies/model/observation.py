"""The observation of a policy: columns and values by the names of the state's features."""

import numpy as np
import numpy.typing as npt

from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX

Array32 = npt.NDArray[np.float32]
Array64 = npt.NDArray[np.float64]


def column(obs_WF: Array32, name: str) -> Array64:
    """One feature of all ranks as float64, NaN where unknown."""
    return obs_WF[:, RANK_INDEX[name]].astype(np.float64)


def job_value(global_F: Array32, name: str) -> float:
    """One feature of the job, NaN when unknown."""
    return float(global_F[GLOBAL_INDEX[name]])


def decided_sizes(obs_WF: Array32) -> tuple[int, ...]:
    """The arbitrator's own last decision, which every delta is relative to."""
    return tuple(obs_WF[:, RANK_INDEX["decided_local_batch_size"]].astype(np.int64).tolist())
