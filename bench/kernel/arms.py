"""What shows from outside: the same work with the probe, without it, and with it where it sees nothing.

Every round does one block in each arm, in a random order. `placebo` attaches the very programs to a control group
without processes, and `placebo 2` does the same again: how far those two are apart is what such a measurement can show
where there is nothing to be seen. An arm is compared with the `off` of its own round.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.kernel.endpoints import Block, Endpoints
from bench.kernel.groups import Groups
from bench.kernel.programs import Programs
from bench.kernel.traffic import Workload
from bench.kernel.training import Job, Training
from bench.paired import compare

ON, OFF, PLACEBO, PLACEBO_2 = "on", "off", "placebo", "placebo 2"
ARMS = (ON, OFF, PLACEBO, PLACEBO_2)
PLACEBOS = "both placebos"
COMPARED = ((ON, OFF), (PLACEBO, OFF), (PLACEBO_2, OFF), (ON, PLACEBOS))

Seconds = npt.NDArray[np.float64]


class Arms:
    """Switches the probe on, off, or to where it sees nothing."""

    def __init__(self, programs: Programs, groups: Groups) -> None:
        self._programs = programs
        self._groups = groups

    def entered(self, arm: str) -> contextlib.AbstractContextManager[None]:
        """The probe as it is in this arm."""
        if arm == OFF:
            return contextlib.nullcontext()
        return self._programs.attached(self._groups.busy if arm == ON else self._groups.empty)


def of_loopback(arms: Arms, ends: Endpoints, workload: Workload, num_rounds: int, duration_s: float) -> dict[str, Any]:
    """New connections in each block, opened within the arm."""

    def block() -> Block:
        return ends.block(workload, duration_s)

    return _comparison(workload.name, workload.item, _rounds(arms, block, num_rounds, workload.name))


def of_training(arms: Arms, ranks: Training, job: Job, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """The same ranks go through all arms; their sockets were opened under the probe."""

    def block() -> Block:
        return ranks.block(job, num_steps)

    return _comparison(job.name, "step", _rounds(arms, block, num_rounds, job.name))


def _rounds(arms: Arms, block: Callable[[], Block], num_rounds: int, name: str) -> list[dict[str, Block]]:
    generator = random.Random(0)
    rounds = []
    block()  # caches, buffers, congestion control
    for number in range(num_rounds):
        done = {}
        for arm in generator.sample(ARMS, len(ARMS)):
            with arms.entered(arm):
                done[arm] = block()
        rounds.append(done)
        if (number + 1) % 10 == 0:
            sys.stderr.write(f"  {name}: {number + 1} of {num_rounds} rounds\n")
    return rounds


def _comparison(name: str, item: str, rounds: list[dict[str, Block]]) -> dict[str, Any]:
    return {
        "name": name,
        "item": item,
        "num_rounds": len(rounds),
        "clocks": {
            "wall clock": _compared(rounds, lambda block: block.wall_s / block.num_items),
            "CPU time": _compared(rounds, lambda block: block.cpu_s / block.num_items),
        },
    }


def _compared(rounds: list[dict[str, Block]], per_item_s: Callable[[Block], float]) -> list[dict[str, Any]]:
    by_arm: dict[str, Seconds] = {arm: np.array([per_item_s(done[arm]) for done in rounds]) for arm in ARMS}
    by_arm[PLACEBOS] = (by_arm[PLACEBO] + by_arm[PLACEBO_2]) / 2
    return [_difference(arm, against, by_arm[arm], by_arm[against]) for arm, against in COMPARED]


def _difference(arm: str, against: str, here: Seconds, there: Seconds) -> dict[str, Any]:
    percent = 100 * (here - there) / there.mean()
    return {
        "arm": arm,
        "against": against,
        "median_ms": 1000 * float(np.median(here)),
        "against_median_ms": 1000 * float(np.median(there)),
        **compare(here, there),
        "quartiles_percent": _floats(np.percentile(percent, [25, 75])),
        "rounds_percent": _floats(percent),
    }


def _floats(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values]
