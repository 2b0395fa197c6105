"""Figures of training steps: how many per second the slowest rank makes, against plain DDP."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from bench.exchange.plan import ALL_REDUCE
from bench.exchange.result import LOSSLESS
from bench.exchange.steps.plan import StepsCase
from bench.exchange.steps.rank import StepsTimings
from bench.harness.command import Target
from bench.harness.tables import aligned

GOAL_WORKLOADS = ("ncf", "lstm-zipf")
GOAL_LINK = "100mbit"
MAX_DRIFT = 1e-4
"""Difference of parameters after all steps of codecs without loss: they add in another order than the all-reduce."""
AT_LEAST = 3.7
"""Steps per second of `rows` over plain DDP's where communication dominates; the published figure is up to 3.74."""


class StepsFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of a case."""

    arm: str
    steps_per_s: float
    """Median over rounds."""
    range_per_s: tuple[float, float]
    speedup: float
    """Steps per second over plain DDP's."""
    tx_bytes: float
    """Sent by a rank in a step: median over rounds of the mean over ranks."""
    cpu_s: float
    """CPU time of all ranks in a step, median."""
    error: float
    is_same: bool
    """Whether all ranks ended with the same parameters."""

    @property
    def is_right(self) -> bool:
        """Whether all ranks have the same parameters, and plain DDP's where there is no loss."""
        return self.is_same and (self.arm.partition("@")[0] not in LOSSLESS or self.error <= MAX_DRIFT)


class StepsResult(msgspec.Struct, frozen=True, kw_only=True):
    """A case with its arms."""

    case: StepsCase
    arms: list[StepsFigures]

    @property
    def name(self) -> str:
        """The case in words."""
        case = self.case
        return f"{case.workload}, {case.num_ranks} ranks, {case.local_batch_size} samples each, {case.link}"

    @property
    def line(self) -> str:
        """The speed-ups."""
        return f"{self.name}: {', '.join(f'{arm.arm} {arm.speedup:.2f}x' for arm in self.arms)}"


def summarise(case: StepsCase, num_steps: int, timings: Sequence[Mapping[str, StepsTimings]]) -> StepsResult:
    """Figures of all ranks' timings, each of so many steps."""
    arms: list[StepsFigures] = []
    for name in timings[0]:
        ranks = [rank[name] for rank in timings]
        rates = [num_steps / max(times) for times in zip(*(rank.wall_s for rank in ranks), strict=True)]
        median = statistics.median(rates)
        sent = map(statistics.mean, zip(*(rank.tx_bytes for rank in ranks), strict=True))
        spent = map(sum, zip(*(rank.cpu_s for rank in ranks), strict=True))
        arms.append(
            StepsFigures(
                arm=name,
                steps_per_s=median,
                range_per_s=(min(rates), max(rates)),
                speedup=median / (arms[0].steps_per_s if arms else median),
                tx_bytes=statistics.median(sent) / num_steps,
                cpu_s=statistics.median(spent) / num_steps,
                error=max(rank.error for rank in ranks),
                is_same=len({rank.digest for rank in ranks}) == 1,
            )
        )
    assert arms[0].arm == ALL_REDUCE
    return StepsResult(case=case, arms=arms)


def missed(results: Sequence[StepsResult]) -> list[str]:
    """Arms whose parameters are not right, in words."""
    return [
        f"{arm.arm} with {result.name}: error {arm.error:.2g}, ranks {'alike' if arm.is_same else 'DIFFER'}"
        for result in results
        for arm in result.arms
        if not arm.is_right
    ]


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
    headings = ("", "steps/s", "range", "speed-up", "MB sent", "CPU ms", "error")
    tables = []
    for result in results:
        rows = [
            (
                arm.arm,
                f"{arm.steps_per_s:.2f}",
                f"{arm.range_per_s[0]:.2f} - {arm.range_per_s[1]:.2f}",
                f"{arm.speedup:.2f}",
                f"{1e-6 * arm.tx_bytes:.3f}",
                f"{1e3 * arm.cpu_s:.1f}",
                f"{arm.error:.1g}" if arm.is_same else "RANKS DIFFER",
            )
            for arm in result.arms
        ]
        tables.append(f"{result.name}\n{aligned(headings, rows)}")
    return "\n\n".join(tables)
