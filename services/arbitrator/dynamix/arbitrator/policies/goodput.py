"""`goodput`: Pollux's rule (Qiao et al., OSDI 2021; AdaptDL), applied to a running job once per window.

    goodput(B) = throughput(B) * efficiency(B)
    throughput(B) = B / T(B)
    efficiency(B) = gain / scale,  scale = B / B_0,  gain = (S/B_0 + |G|^2) / (S/B_0/scale + |G|^2)
                  = (B_0 + B_noise) / (B + B_noise)

with B_0 the base global batch of the learning rate. Of 50 geometrically spaced batches the best one is chosen, if it
promises 5 % more goodput, as in AdaptDL. Unlike AdaptDL it decides per window instead of per restart, smooths times,
and may go below the initial batch.
"""

import math
from typing import ClassVar

import msgspec
import numpy as np

from dynamix.schemas.messages import Job
from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .carry import pack, unpack
from .model.observation import Array32, Array64, NoiseMemory, decided_sizes, job_value
from .model.step_time import StepTime, StepTimeFit, window_of
from .options import allocation_of, option, tracks
from .policy import Decision
from .sizing import by_speed, equally

NUM_CANDIDATES = 50


class _State(msgspec.Struct, array_like=True):
    noise: NoiseMemory = NoiseMemory()
    fit: StepTimeFit | None = None


class Goodput:
    """Chooses the batch of the greatest predicted goodput."""

    name = "goodput"
    version = 3
    options: ClassVar[Options] = POLICY_OPTIONS["goodput"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The best candidate, if it is enough better than the current sizes. Without B_noise the batch stays."""
        state = unpack(_State, carry)
        noise = state.noise.observe(job_value(global_F, "noise_scale"))
        fit = StepTimeFit.of(state.fit, job)
        fit = fit.observe(
            job, window_of(job, obs_WF, global_F), jump=math.inf, smoothing=option(self.options, job, "smoothing")
        )
        sizes, model = decided_sizes(obs_WF), fit.model(job)
        if model is not None:
            sizes = self._chosen(job, sizes, model, option(self.options, job, "noise_multiplier") * noise.noise_scale)
        allocation = allocation_of(self.options, job, sizes)
        reason = _reason(allocation.global_batch_size - sum(decided_sizes(obs_WF)), model, noise.noise_scale)
        return Decision(allocation, carry=pack(_State(noise, fit.kept())), reason=reason)

    def _chosen(self, job: Job, current: tuple[int, ...], model: StepTime, noise_scale: float) -> tuple[int, ...]:
        proportional = option(self.options, job, "proportional") == 1
        if math.isnan(noise_scale):
            return by_speed(job, sum(current), model, current) if proportional else current
        candidates = np.geomspace(max(model.smallest, 1.0), max(model.largest, 1.0), NUM_CANDIDATES)
        times_s = (model.balanced if proportional or tracks(self.options, job) else model.equal)(candidates)
        values = goodput(candidates, times_s, noise_scale, job.base_global_batch_size)
        best = round(float(candidates[int(np.argmax(values))]))
        total = np.array([float(sum(current))])
        now_s = model.balanced(total) if tracks(self.options, job) else np.array([model.of(current)])
        now = float(goodput(total, now_s, noise_scale, job.base_global_batch_size)[0])
        if float(values.max()) <= (1 + option(self.options, job, "hysteresis")) * now:
            return current
        return model.divide(best) if proportional else equally(job, best)


def _reason(change: int, model: StepTime | None, noise_scale: float) -> str:
    if model is None:
        return "no step was measured yet"
    if math.isnan(noise_scale):
        return "no noise scale is known yet"
    known = f"at a noise scale of {noise_scale:.3g}"
    if change == 0:
        return f"no other batch promises enough more goodput {known}"
    return f"the greatest predicted goodput {known}"


def goodput(global_batch_sizes: Array64, step_times_s: Array64, noise_scale: float, base: int) -> Array64:
    """Samples per second, each counted by what it is worth beside one in a batch of `base` (AdaptDL, goodput.py)."""
    efficiency = (base + noise_scale) / (global_batch_sizes + noise_scale)
    worth: Array64 = global_batch_sizes / np.maximum(step_times_s, 1e-12) * efficiency
    return worth
