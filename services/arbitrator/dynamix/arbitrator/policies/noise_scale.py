"""`noise-scale`: the global batch follows the gradient noise scale (McCandlish et al., arXiv 1812.06162).

B = multiplier * B_noise; step times are not considered.
"""

import math
from typing import ClassVar

import msgspec

from dynamix.schemas.messages import Job
from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .carry import pack, unpack
from .model.observation import Array32, NoiseMemory, decided_sizes, job_value
from .model.step_time import StepTimeFit, window_of
from .options import allocation_of, option
from .policy import Decision
from .sizing import Pace, by_speed, clamp_total, equally

_PACE = Pace()


class _State(msgspec.Struct, array_like=True):
    noise: NoiseMemory = NoiseMemory()
    fit: StepTimeFit | None = None


class NoiseScale:
    """Keeps the global batch at a multiple of the noise scale; it may go below the initial batch."""

    name = "noise-scale"
    version = 3
    options: ClassVar[Options] = POLICY_OPTIONS["noise-scale"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """A limited step towards the multiple. While B_noise was never known the batch stays."""
        state = unpack(_State, carry)
        noise = state.noise.observe(job_value(global_F, "noise_scale"))
        fit = StepTimeFit.of(state.fit, job).observe(job, window_of(job, obs_WF, global_F))
        current = decided_sizes(obs_WF)
        total = self._total(job, sum(current), noise.noise_scale)
        if option(self.options, job, "proportional") == 1:
            sizes = by_speed(job, total, fit.model(job), current)
        else:
            sizes = current if total == sum(current) else equally(job, total)
        factor, reason = option(self.options, job, "multiplier"), "no noise scale is known yet"
        if not math.isnan(noise.noise_scale):
            reason = f"towards {factor:g} times the noise scale of {noise.noise_scale:.3g}"
        return Decision(allocation_of(self.options, job, sizes), carry=pack(_State(noise, fit.kept())), reason=reason)

    def _total(self, job: Job, current: int, noise_scale: float) -> int:
        if math.isnan(noise_scale):
            return clamp_total(job, current)
        pace = _PACE._replace(max_change=option(self.options, job, "max_change"))
        target = clamp_total(job, option(self.options, job, "multiplier") * noise_scale)
        return clamp_total(job, pace.step(max(current, 1), max(target, 1)))
