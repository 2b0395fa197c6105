"""Figures of an exchange: how long it takes until all ranks have the sum, against the all-reduce; targets, curves."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from bench.exchange.figures import MeasuredArm, figures_of, tables
from bench.exchange.plan import Case, ExchangePlan, LinkedCase
from bench.exchange.rank import ArmTimings
from bench.harness.command import Target
from bench.harness.figure import Curve, Panel

BITS = 32
"""Bits of each number."""
MAX_ERROR = 1e-6
"""Difference of a lossless sum from the all-reduce's, which adds in another order, over the largest number."""


class _Goal(NamedTuple):
    """A speed-up that is asked of a codec, with 4 ranks behind links of 100 Mbit/s, 5 % dense."""

    codec: str
    mask: str
    at_least: float


GOALS = (
    _Goal("rows", "independent", 3.8),
    _Goal("rows", "identical", 8.0),
    _Goal("rows", "steady", 8.0),
    _Goal("sketch", "identical", 6.3),
    _Goal("sketch", "steady", 6.3),
)


class ArmFigures(MeasuredArm, frozen=True, kw_only=True):
    """One arm of a case."""

    max_error: ClassVar[float] = MAX_ERROR

    median_s: float
    """Median over rounds of the time of the slowest rank."""
    range_s: tuple[float, float]
    throughput_mbit_s: float
    """Bits of the dense gradient over the median."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """A case with its arms."""

    case: Case
    num_elements: int
    arms: list[ArmFigures]

    @property
    def name(self) -> str:
        """The case in words."""
        case = self.case
        masks = "" if case.density == 1 else f", {case.mask} masks"
        return f"{case.network}, {100 * case.density:g} % dense, rows of {case.width}{masks}"


def summarise(case: Case, num_elements: int, timings: Sequence[Mapping[str, ArmTimings]]) -> CaseResult:
    """Figures of all ranks' timings."""
    return CaseResult(case=case, num_elements=num_elements, arms=list(_figures(num_elements, timings)))


def _figures(num_elements: int, timings: Sequence[Mapping[str, ArmTimings]]) -> Iterator[ArmFigures]:
    all_reduce_s = 0.0
    for name in timings[0]:
        ranks = [rank[name] for rank in timings]
        slowest = [max(times) for times in zip(*(rank.wall_s for rank in ranks), strict=True)]
        median_s = statistics.median(slowest)
        all_reduce_s = all_reduce_s or median_s  # it is the first arm
        yield ArmFigures(
            arm=name,
            median_s=median_s,
            range_s=(min(slowest), max(slowest)),
            throughput_mbit_s=1e-6 * BITS * num_elements / median_s,
            speedup=all_reduce_s / median_s,
            **figures_of(ranks),
        )


def targets_of(results: Sequence[CaseResult]) -> list[Target]:
    """The goals whose case and arm were measured."""
    return [
        Target(name=f"{goal.codec} over all-reduce, {result.name}", value=arm.speedup, at_least=goal.at_least)
        for result in results
        for goal in GOALS
        for arm in result.arms
        if (result.case.num_ranks, result.case.link, result.case.density) == (4, "100mbit", 0.05)
        and (arm.arm, result.case.mask) == (goal.codec, goal.mask)
    ]


def text_of(results: Sequence[CaseResult]) -> str:
    """A table for each case."""
    return tables(
        results,
        ("ms", "range", "Mbit/s"),
        lambda arm: (
            f"{1e3 * arm.median_s:.1f}",
            f"{1e3 * arm.range_s[0]:.1f} - {1e3 * arm.range_s[1]:.1f}",
            f"{arm.throughput_mbit_s:,.0f}",
        ),
    )


def panels_of(results: Sequence[CaseResult], plan: ExchangePlan) -> list[list[Panel]]:
    """Throughput over density: a row for each number of ranks and width, a panel for each link and mask."""
    rows: dict[tuple[int, int, int], list[Panel]] = {}
    for num_ranks, num_servers, width, link, mask in itertools.product(
        plan.ranks, plan.servers, plan.widths, plan.links, plan.masks
    ):
        network = LinkedCase(num_ranks=num_ranks, num_servers=num_servers, link=link).network
        chosen = [  # a dense gradient has any mask
            result
            for result in results
            if (result.case.network, result.case.width) == (network, width)
            and (result.case.mask == mask or result.case.density == 1)
        ]
        panel = Panel(
            title=f"{network}, {mask} masks, rows of {width}",
            x="per cent dense",
            y="Mbit/s of the dense gradient",
            logarithmic=True,
            curves=[Curve(label=name, points=_points(chosen, name)) for name in plan.rank.arms],
        )
        rows.setdefault((num_ranks, num_servers, width), []).append(panel)
    return list(rows.values())


def _points(results: Sequence[CaseResult], name: str) -> list[tuple[float, float]]:
    """Per cent dense and throughput of one arm."""
    return sorted(
        (100 * result.case.density, arm.throughput_mbit_s)
        for result in results
        for arm in result.arms
        if arm.arm == name
    )
