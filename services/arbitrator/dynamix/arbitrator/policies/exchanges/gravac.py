"""`gravac`: the codec of the greatest throughput times gain (GraVAC: Tyagi and Swany, arXiv 2305.12201).

    gain = |what was sent|^2 / |what should have been|^2        samples per second * gain, of codecs with gain >= floor

Each permitted codec is tried for some windows; the best one is then used until the next search. Gain is the state's
`coding_gain`, 1 without loss. Unlike GraVAC, which codes every gradient twice, a codec must be active to be measured. A
codec that rounds has a gain of 1.00; residuals count as lost. The batch stays. It needs `attach(exchange="lossy")`;
elsewhere only codecs without loss are tried.
"""

import math
import struct
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from dynamix.arbitrator.policies.base.options import Option, Options, allocation_of, option, track
from dynamix.arbitrator.policies.base.policy import Decision
from dynamix.arbitrator.policies.model.observation import Array32, Array64, job_value
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import LOSSY_CODECS, Exchange, is_permitted

CODECS = ("none", "bf16", "int8")
"""Candidates, from the least compression to the most. `rows` and `sketch` save nothing where gradients are dense."""
LAG = 2
"""Windows after which a decision rules."""

_HEAD = struct.Struct(f"<I{LAG + 1}B")
_NUMBERS = 2 * len(CODECS)


class _Trials(NamedTuple):
    """What is known of the codecs, which are numbers here."""

    num_windows: int = 0
    ruling: tuple[int, ...] = (0,) * LAG
    """What rules the window that closed, and so on to the newest decision."""
    best: int = 0
    """The choice of the last search."""
    throughput: Array64 = np.full(len(CODECS), math.nan)
    """Samples per second, averaged; NaN where not measured."""
    gain: Array64 = np.full(len(CODECS), math.nan)

    def observe(self, throughput: float, gain: float, smoothing: float) -> "_Trials":
        """The same after one more window, in which the first of `ruling` ruled."""
        ruled = self.ruling[0]
        gain = gain if CODECS[ruled] in LOSSY_CODECS else 1.0
        if not (0 < throughput < math.inf and 0 < gain < math.inf):
            return self
        averages = []
        for values, newest in ((self.throughput, throughput), (self.gain, gain)):
            averaged = values.copy()
            old = float(values[ruled]) if values[ruled] > 0 else newest
            averaged[ruled] = old + smoothing * (newest - old)
            averages.append(averaged)
        return self._replace(throughput=averages[0], gain=averages[1])

    def choose(self, candidates: Sequence[int], floor: float) -> int:
        """The best of what was measured; gradients as they are where nothing else was."""
        fit = [number for number in candidates if self.throughput[number] > 0 and self.gain[number] >= floor]
        return max(fit, key=lambda number: float(self.throughput[number]) * float(self.gain[number]), default=0)


class GraVAC:
    """Tries codecs, and chooses by throughput and gain."""

    name = "gravac"
    version = 1
    options: ClassVar[Options] = {
        "floor": Option(0.7, 0, 1, "least gain of a codec"),
        "trial": Option(4, LAG + 1, 10_000, "windows for which each codec is tried", whole=True),
        "hold": Option(100, 1, 1e6, "windows between two searches", whole=True),
        "smoothing": Option(0.5, 0.01, 1, "weight of the newest window in the averages"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The codec that is to be tried, or the best one of the last search."""
        throughput, gain = job_value(global_F, "throughput"), job_value(global_F, "coding_gain")
        trials = _unpack(carry).observe(throughput, gain, option(self.options, job, "smoothing"))
        exchanges = [Exchange(codec=codec) for codec in CODECS]
        candidates = [number for number, each in enumerate(exchanges) if is_permitted(each, job.exchange)]
        trial = int(option(self.options, job, "trial"))
        searched = trial * len(candidates)
        place = trials.num_windows % (searched + int(option(self.options, job, "hold")))
        if place == searched:
            trials = trials._replace(best=trials.choose(candidates, option(self.options, job, "floor")))
        chosen = candidates[place // trial] if place < searched else trials.best
        ruling = (*trials.ruling[1:], chosen)
        trials = trials._replace(num_windows=(trials.num_windows + 1) % 2**32, ruling=ruling)
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchanges[chosen])
        reason = f"codec {CODECS[chosen]}, " + ("to try it" if place < searched else "by throughput times gain")
        return Decision(allocation, carry=_pack(trials), reason=reason)


def _pack(trials: _Trials) -> bytes:
    numbers = np.concatenate([trials.throughput, trials.gain]).astype("<f8")
    return _HEAD.pack(trials.num_windows, *trials.ruling, trials.best) + numbers.tobytes()


def _unpack(carry: bytes) -> _Trials:
    if len(carry) != _HEAD.size + 8 * _NUMBERS:
        return _Trials()
    num_windows, *codecs = _HEAD.unpack_from(carry)
    if max(codecs) >= len(CODECS):
        return _Trials()
    numbers = np.frombuffer(carry[_HEAD.size :], dtype="<f8").astype(np.float64)
    numbers = np.where((numbers > 0) & np.isfinite(numbers), numbers, math.nan)
    return _Trials(num_windows, tuple(codecs[:-1]), codecs[-1], numbers[: len(CODECS)], numbers[len(CODECS) :])
