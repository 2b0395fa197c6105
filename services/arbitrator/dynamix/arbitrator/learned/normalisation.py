"""Running mean and variance of the inputs, saved with the policy; unknown becomes 0 and a bit that says so."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dynamix.arbitrator.policies.model.observation import Array32, Array64

CLIP = 5.0
"""Standard deviations beyond which an input says no more: a cluster unlike any seen must not drive the network mad."""

EPSILON = 1e-8
Array = npt.NDArray[np.float32]


class Normalisation(NamedTuple):
    """Moments of each input over all values known so far (Chan's parallel update, float64)."""

    count_I: Array64
    mean_I: Array64
    m2_I: Array64
    """Sum of squared deviations from the mean."""

    @classmethod
    def empty(cls, num_inputs: int) -> Self:
        """Nothing seen: inputs pass as they are."""
        return cls(np.zeros(num_inputs), np.zeros(num_inputs), np.zeros(num_inputs))

    def updated(self, inputs_NI: Array32) -> "Normalisation":
        """The moments with the known values of more rows added."""
        values, known = inputs_NI.astype(np.float64), ~np.isnan(inputs_NI)
        num = known.sum(axis=0).astype(np.float64)
        mean = np.where(known, values, 0.0).sum(axis=0) / np.maximum(num, 1)
        m2 = np.where(known, values - mean, 0.0) ** 2
        total = self.count_I + num
        shift, share = mean - self.mean_I, num / np.maximum(total, 1)
        return Normalisation(
            total,
            self.mean_I + shift * share,
            self.m2_I + m2.sum(axis=0) + shift**2 * self.count_I * share,
        )

    def applied(self, inputs_NI: Array32) -> Array64:
        """Rows of 2 I numbers: the normalised inputs, 0 where unknown, then one bit per input that is known."""
        known = ~np.isnan(inputs_NI)
        deviation = np.where(self.count_I > 1, np.sqrt(self.m2_I / np.maximum(self.count_I, 1) + EPSILON), 1.0)
        normal = np.clip((inputs_NI.astype(np.float64) - self.mean_I) / np.maximum(deviation, 1e-4), -CLIP, CLIP)
        return np.concatenate([np.where(known, normal, 0.0), known.astype(np.float64)], axis=1)

    def tensors(self) -> dict[str, Array64]:
        """The moments as tensors of a policy file."""
        return {f"normalisation.{name.removesuffix('_I')}": array for name, array in self._asdict().items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        """The moments in the tensors of a policy file."""
        return cls(*(tensors[f"normalisation.{name}"].astype(np.float64) for name in ("count", "mean", "m2")))
