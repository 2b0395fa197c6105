"""What shows from outside: the same work with the probe, without it, and with it where it sees nothing.

Every round does one block in each arm, in a random order. `placebo` attaches the very programs to a control group
without processes, and `placebo 2` does the same again: how far those two are apart is what such a measurement can show
where there is nothing to be seen. An arm is compared with the `off` of its own round.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from bench.harness.rounds import Rounds, Timing, Values, difference

ON, OFF, PLACEBO, PLACEBO_2 = "on", "off", "placebo", "placebo 2"
ARMS = (ON, OFF, PLACEBO, PLACEBO_2)
PLACEBOS = "both placebos"
COMPARED = ((ON, OFF), (PLACEBO, OFF), (PLACEBO_2, OFF), (ON, PLACEBOS))

Switch = Callable[[str], contextlib.AbstractContextManager[None]]
"""The probe as it is in an arm."""


def compare_arms(
    switch: Switch, block: Callable[[], Timing], num_rounds: int, *, name: str, item: str
) -> dict[str, Any]:
    """Run blocks of some work in all arms; wall clock and CPU time per item, and their differences in percent."""
    rounds = Rounds(ARMS, num_rounds, label=name)
    for arm in rounds:
        with switch(arm):
            rounds.record(block())
    clocks: dict[str, Callable[[Timing], float]] = {
        "wall clock": lambda timing: 1 / timing.per_s,
        "CPU time": lambda timing: 1 / timing.per_cpu_s,
    }
    return {
        "name": name,
        "item": item,
        "num_rounds": num_rounds,
        "clocks": {clock: _differences(rounds.timings, per_item_s) for clock, per_item_s in clocks.items()},
    }


def _differences(timings: dict[str, list[Timing]], per_item_s: Callable[[Timing], float]) -> list[dict[str, Any]]:
    by_arm: dict[str, Values] = {arm: np.array([per_item_s(one) for one in found]) for arm, found in timings.items()}
    by_arm[PLACEBOS] = (by_arm[PLACEBO] + by_arm[PLACEBO_2]) / 2
    return [{"arm": arm, "against": off, **_difference(by_arm[arm], by_arm[off])} for arm, off in COMPARED]


def _difference(here: Values, there: Values) -> dict[str, Any]:
    percent = 100 * (here - there) / there.mean()
    return {
        "median_ms": 1000 * float(np.median(here)),
        "against_median_ms": 1000 * float(np.median(there)),
        **difference(here, there),
        "quartiles_percent": np.percentile(percent, [25, 75]).tolist(),
        "rounds_percent": percent.tolist(),
    }
