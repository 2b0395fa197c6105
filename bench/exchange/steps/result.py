"""Figures of training steps: how many per second the slowest rank makes, against plain DDP."""

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
from bench.exchange.figures import MeasuredArm, figures_of, tables
from bench.exchange.plan import ALL_REDUCE
from bench.exchange.rank import ArmTimings
from bench.exchange.steps.plan import StepsCase
from bench.harness.command import Target

GOAL_WORKLOADS = ("ncf", "lstm-zipf")
GOAL_LINK = "100mbit"
MAX_DRIFT = 1e-4
"""Difference of parameters after all steps of codecs without loss: they add in another order than the all-reduce."""
AT_LEAST = 3.7
"""Steps per second of `rows` over plain DDP's where communication dominates; the published figure is up to 3.74."""


class StepsFigures(MeasuredArm, frozen=True, kw_only=True):
    """One arm of a case, which is plain DDP where it is the first one."""

    max_error: ClassVar[float] = MAX_DRIFT

    steps_per_s: float
    """Median over rounds."""
    range_per_s: tuple[float, float]


class StepsResult(msgspec.Struct, frozen=True, kw_only=True):
    """A case with its arms."""

    case: StepsCase
    arms: list[StepsFigures]

    @property
    def name(self) -> str:
        """The case in words."""
        case = self.case
        return f"{case.workload}, {case.local_batch_size} samples each, {case.network}"


def summarise(case: StepsCase, num_steps: int, timings: Sequence[Mapping[str, ArmTimings]]) -> StepsResult:
    """Figures of all ranks' timings, each of so many steps."""
    arms: list[StepsFigures] = []
    for name in timings[0]:
        ranks = [rank[name] for rank in timings]
        rates = [num_steps / max(times) for times in zip(*(rank.wall_s for rank in ranks), strict=True)]
        median = statistics.median(rates)
        arms.append(
            StepsFigures(
                arm=name,
                steps_per_s=median,
                range_per_s=(min(rates), max(rates)),
                speedup=median / (arms[0].steps_per_s if arms else median),
                **figures_of(ranks, num_steps),
            )
        )
    assert arms[0].arm == ALL_REDUCE
    return StepsResult(case=case, arms=arms)


def targets_of(results: Sequence[StepsResult]) -> list[Target]:
    """What `rows` has to gain, where it was measured."""
    return [
        Target(name=f"rows over plain DDP, {result.name}", value=arm.speedup, at_least=AT_LEAST)
        for result in results
        for arm in result.arms
        if arm.arm == "rows" and result.case.workload in GOAL_WORKLOADS and result.case.link == GOAL_LINK
    ]


def text_of(results: Sequence[StepsResult]) -> str:
    """A table for each case."""
    return tables(
        results,
        ("steps/s", "range"),
        lambda arm: (f"{arm.steps_per_s:.2f}", f"{arm.range_per_s[0]:.2f} - {arm.range_per_s[1]:.2f}"),
    )
