"""A campaign: which runs a case needs, in turn, with paired seeds and a search for the baselines' best settings. Pure.

The searches are made under the first seed, and a setting that is not at the target when the best one so far was is cut
off there, or before, where its curve is clearly below. What was found best takes part in the comparison with all seeds,
the first one included, which flatters it.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from .arms import (
    DIVIDED,
    GOODPUT,
    GOODPUTS,
    PLAIN,
    PPO,
    RECORDED,
    ROWS,
    RULE,
    RULE_LOCAL,
    STATIC,
    STATIC_LOCAL,
    STATICS,
    TargetArm,
    keeping_sum,
    static_local,
)
from .cases import TargetCase
from .outcomes import TargetOutcome, TargetPoint

RECORDED_S = 20.0
"""Training time of the recorded run, whatever its accuracy: some fifteen windows on slow links."""
BY_SEARCH = {STATIC: STATICS, GOODPUT: GOODPUTS}


class RunArm(Protocol):
    """Runs a case with an arm and a seed, up to a limit of training time or until it is far behind the best so far."""

    async def __call__(
        self, case: TargetCase, arm: TargetArm, seed: int, limit_s: float, best_so_far: Sequence[TargetPoint] = ()
    ) -> TargetOutcome:
        """What came of it."""
        ...


class CaseOutcomes(NamedTuple):
    """All runs of a case."""

    case: TargetCase
    arms: dict[str, TargetArm]
    """By row, those with the settings that were found best."""
    outcomes: dict[str, list[TargetOutcome]]
    """By row, one per seed."""
    searched: dict[str, list[TargetOutcome]]
    """By row that was searched for, all its settings under the first seed."""


def num_runs(rows: Collection[str], num_seeds: int, *, recorded: bool = True) -> int:
    """Runs of a case at most; some settings of a search are those of a row."""
    needed = _needed(rows)
    searched = sum(len(BY_SEARCH[row]) - 1 for row in needed if row in BY_SEARCH)
    return searched + len(needed) * num_seeds + recorded - (PLAIN in needed and STATIC in needed)


async def compare(
    case: TargetCase, rows: Collection[str], seeds: Sequence[int], run: RunArm, *, recorded: bool = True
) -> CaseOutcomes:
    """Run a case with all arms of some rows and under all seeds; first, unless told not to, what predictions need."""
    needed, first = _needed(rows), seeds[0]
    if recorded:
        await run(case, RECORDED, first, min(RECORDED_S, case.time_limit_s))
    arms: dict[str, TargetArm] = {PLAIN: TargetArm(policy=None)}
    searched = {}
    for row, settings in BY_SEARCH.items():
        if row in needed:
            arms[row], searched[row] = await _best_of(case, settings, first, run)
    for row in DIVIDED:
        if STATIC in arms:
            arms[row] = keeping_sum(row, arms[STATIC].local_batch_size)
    if STATIC in arms:
        arms[STATIC_LOCAL] = static_local(arms[STATIC].local_batch_size)
    arms |= {row: TargetArm(policy=row) for row in (RULE, PPO)}
    arms[RULE_LOCAL] = TargetArm(policy=RULE, exchange="local")
    outcomes: dict[str, list[TargetOutcome]] = {row: [] for row in ROWS if row in needed}
    for number, seed in enumerate(seeds):
        in_turn = list(outcomes) if number % 2 == 0 else list(reversed(outcomes))
        for row in in_turn:
            outcomes[row].append(await run(case, arms[row], seed, case.time_limit_s))
    return CaseOutcomes(case, {row: arms[row] for row in outcomes}, outcomes, searched)


async def _best_of(
    case: TargetCase, settings: Sequence[TargetArm], seed: int, run: RunArm
) -> tuple[TargetArm, list[TargetOutcome]]:
    """The setting that reaches the target first, and all outcomes; the first setting runs to the case's limit."""
    best, limit_s = settings[0], case.time_limit_s
    found: list[TargetOutcome] = []
    best_so_far: list[TargetPoint] = []
    for arm in settings:
        found.append(await run(case, arm, seed, limit_s, best_so_far))
        reached_s = found[-1].time_to_target_s
        if reached_s is not None and (reached_s < limit_s or arm is settings[0]):
            best, limit_s, best_so_far = arm, reached_s, found[-1].points
    return best, found


def _needed(rows: Collection[str]) -> list[str]:
    """The rows that were asked for and those that they start from."""
    starts_from_static = {*DIVIDED, STATIC_LOCAL} & set(rows)
    return [row for row in ROWS if row in rows or (row == STATIC and starts_from_static)]
