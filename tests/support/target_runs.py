"""Runs of the comparison on real clocks, made up: the times that each arm takes are known."""

import asyncio
from collections.abc import Sequence

from bench.cluster.target.arms import ROWS, TargetArm
from bench.cluster.target.campaign import CaseOutcomes, compare
from bench.cluster.target.cases import TargetCase
from bench.cluster.target.outcomes import LOOKS, TargetOutcome, TargetPoint

CASE = TargetCase(name="unequal-processors", title="one is slow", slow_cpus={3: 0.15}, time_limit_s=40.0)


def outcome_of(arm: TargetArm, seed: int, time_s: float, limit_s: float, case: TargetCase = CASE) -> TargetOutcome:
    reached = time_s <= limit_s
    end_s = min(time_s, limit_s)
    accuracy = 0.85 if reached else 0.7
    points = [
        TargetPoint(
            trained_s=end_s * look / LOOKS, accuracy=accuracy, num_steps=9, num_samples=99, local_batch_sizes=(9, 9)
        )
        for look in range(1, LOOKS + 1)
    ]
    return TargetOutcome(
        case=case.name,
        arm=arm.label,
        seed=seed,
        time_to_target_s=end_s if reached else None,
        limit_s=limit_s,
        points=points,
        wall_s=2 * end_s,
    )


TIMES_S = {"ddp@32": 30.0, "ddp@64": 20.0, "ddp@128": 24.0, "ddp@256": 90.0, "ddp@16": 50.0, "rule": 14.0, "ppo": 15.0}
TIMES_S |= {"goodput": 18.0, "goodput:track=1,hysteresis=0": 16.0, "goodput:track=1,noise_multiplier=4": 17.0}
TIMES_S |= {"ddp@8": 70.0, "proportional@64": 15.0, "split@64": 14.5, "random": 99.0}
LOCAL = ["static:track=1,every=4,codec=int8@64/exchange=local", "rule/exchange=local"]
TIMES_S |= dict(zip(LOCAL, (12.0, 10.0), strict=True))


class MadeUpRuns:
    """Runs that take the times above, 10 % longer under the second seed."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, float]] = []
        self.best_runs: list[tuple[str, float | None]] = []
        self._known: dict[tuple[str, int], TargetOutcome] = {}

    async def __call__(
        self, case: TargetCase, arm: TargetArm, seed: int, limit_s: float, best_so_far: Sequence[TargetPoint] = ()
    ) -> TargetOutcome:
        self.best_runs.append((arm.label, best_so_far[-1].trained_s if best_so_far else None))
        known = self._known.get((arm.label, seed))
        if known is not None and known.answers(limit_s):
            return known
        self.done.append((arm.label, seed, limit_s))
        self._known[arm.label, seed] = outcome_of(arm, seed, TIMES_S[arm.label] * (0.9 + 0.1 * seed), limit_s, case)
        return self._known[arm.label, seed]


def compared(
    *rows: str, num_seeds: int = 2, runs: MadeUpRuns | None = None
) -> tuple[CaseOutcomes, list[tuple[str, int, float]]]:
    runs = runs or MadeUpRuns()
    found = asyncio.run(compare(CASE, rows or ROWS, range(1, 1 + num_seeds), runs))
    return found, runs.done
