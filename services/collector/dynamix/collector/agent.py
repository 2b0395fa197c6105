"""The agent of one node: what it leaves at its cell after a window, from its own ranks and the traces around. Pure.

It knows nothing of other nodes but the traces in the cells beside its own, sends nothing to any other agent, and
remembers nothing: what it left before comes back with the report, as far as it has not evaporated. So any agent may
die, and a new one continues where the trace lies.

    activity  <-  (1 - a) activity + a * samples / compute time         of each of its ranks
    waiting   <-  (1 - a) waiting + a * min(its ranks' least, FADING * those around)
    appetite  <-  (1 - d) ((1 - a) appetite + a * wish) + d * mean of those around

a is the option `evaporation`, d is `diffusion`. The wish is the global batch B of the greatest progress per second as
seen from here, between 1 / `max_change` and `max_change` of the one in force:

    wish = argmax lr(B)^rate_weight * B / (B + noise_multiplier * B_noise) / (waiting + compute * B / B_now)

where compute is the step without the waiting: what the slowest rank computes. What a step is worth is the formula of
`rule`, and has the same bound (`dynamix.schemas.policies`). The ranks divide B by all activities
(`dynamix.trainer.steering.field`), so that an agent changes its own ranks' share by its own trace alone.
"""

import math
from collections.abc import Mapping

import numpy as np

from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import FieldView, Report, Trace
from dynamix.schemas.policies import STIGMERGY_OPTIONS, most_worthwhile, progress

FADING = 1.1
"""Factor on a waiting time from cell to cell: distant measurements count less."""

NUM_CANDIDATES = 16
"""Global batches that are compared, on either side of the current one."""

BOUNDS = {
    "evaporation": (0.0, 1.0),
    "diffusion": (0.0, 1.0),
    "noise_multiplier": (0.0, math.inf),
    "rate_weight": (0.0, 1.0),
    "max_change": (1.0, 100.0),
}
"""Bounds of the options: a report may be forged."""


def trace_of(report: Report) -> Trace | None:
    """The trace of the report's node; `None` in jobs of other policies.

    Raises:
        MalformedMessageError: when the view does not fit the rows.
    """
    view = report.field
    if view is None:
        return None
    if len(view.activity) != len(report.rows):
        raise MalformedMessageError(
            f"a view of {len(view.activity)} ranks with {len(report.rows)} rows: there must be one for each"
        )
    options = {**STIGMERGY_OPTIONS, **view.options}
    options |= {name: min(max(options[name], low), high) for name, (low, high) in BOUNDS.items()}
    keep = 0.0 if view.own is None else (1.0 - options["evaporation"]) * view.own.strength
    steps = max(report.totals.num_steps, 1)
    least_s = [row.sync_time_s / steps for row in report.rows if row.times_split]
    waiting_s = min([*least_s, *(FADING * seen.waiting_s for seen in view.around)], default=0.0)
    if view.own is not None:
        waiting_s = _mixed(view.own.waiting_s, waiting_s, keep)
    activity = []
    for row, before in zip(report.rows, view.activity, strict=True):
        if row.times_split and row.num_samples and row.compute_time_s > 0:
            activity.append(_mixed(before, row.num_samples / row.compute_time_s, keep if before > 0 else 0.0))
        else:  # a rank that had no samples, or whose times are not known, keeps what it has
            activity.append(before)
    return Trace(
        job=report.job,
        generation=report.generation,
        window=report.window,
        node=report.node,
        ranks=tuple(row.rank for row in report.rows),
        activity=tuple(activity),
        appetite=_appetite(report, view, options, keep, waiting_s),
        waiting_s=waiting_s,
    )


def _appetite(report: Report, view: FieldView, options: Mapping[str, float], keep: float, waiting_s: float) -> float:
    in_force = float(report.totals.global_batch_size)
    if view.keeps_global_batch:
        return in_force
    wish = _wish(report, view, options, waiting_s)
    if wish is None:
        wish = in_force if view.own is None else view.own.appetite
    own = wish if view.own is None else _mixed(view.own.appetite, wish, keep)
    strength = sum(seen.strength for seen in view.around)
    if strength <= 0:
        return own
    around = sum(seen.strength * seen.appetite for seen in view.around) / strength  # fresh traces count for more
    return _mixed(around, own, options["diffusion"])


def _wish(report: Report, view: FieldView, options: Mapping[str, float], waiting_s: float) -> float | None:
    """The best global batch as seen from here; `None` while noise or times are not known."""
    totals = report.totals
    noise, in_force = totals.noise, float(totals.global_batch_size)
    step_s = totals.time_s / max(totals.num_steps, 1)
    if noise is None or noise.squared_norm <= 0 or noise.trace < 0 or in_force < 1 or step_s <= 0:
        return None
    noise_scale = options["noise_multiplier"] * noise.trace / noise.squared_norm
    if noise_scale == math.inf:
        return None
    exponent = options["rate_weight"] * view.rate_exponent
    most = most_worthwhile(noise_scale, view.base_global_batch_size)
    compute_s = max(step_s - waiting_s, 0.0)
    factors: list[float] = [
        options["max_change"] ** (index / NUM_CANDIDATES) for index in range(-NUM_CANDIDATES, NUM_CANDIDATES + 1)
    ]
    times_s = np.array([waiting_s + factor * compute_s for factor in factors])
    with np.errstate(all="ignore"):  # a made-up report may hold any numbers
        worth = progress(np.array(factors) * in_force, noise_scale, exponent, most) / times_s
    return factors[int(worth.argmax())] * in_force


def _mixed(before: float, now: float, share: float) -> float:
    """Exponential moving average: `share` of the value before, the rest of the value now."""
    return share * before + (1.0 - share) * now
