"""Figures of an exchange: how long it takes until all ranks have the sum, against the all-reduce; targets, curves."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from bench.exchange.plan import ALL_REDUCE, Case, ExchangePlan
from bench.exchange.rank import ArmTimings
from bench.harness.command import Target
from bench.harness.figure import Curve, Panel
from bench.harness.tables import aligned

BITS = 32
"""Bits of each number."""
MAX_ERROR = 1e-6
"""Difference of a lossless sum from the all-reduce's, which adds in another order, over the largest number."""
LOSSLESS = (ALL_REDUCE, "torch-sparse", "none", "rows", "sketch")


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


class ArmFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of a case."""

    arm: str
    median_s: float
    """Median over rounds of the time of the slowest rank."""
    range_s: tuple[float, float]
    throughput_mbit_s: float
    """Bits of the dense gradient over the median."""
    speedup: float
    """The all-reduce's median over this one."""
    tx_bytes: float
    """Sent by a rank in an exchange: median over rounds of the mean over ranks."""
    cpu_s: float
    """CPU time of all ranks in an exchange, median."""
    error: float
    is_same: bool
    """Whether the sums of all ranks had the same bits."""

    @property
    def is_right(self) -> bool:
        """Whether all ranks got the same sum, and without loss where none is allowed."""
        return self.is_same and (self.arm.partition("@")[0] not in LOSSLESS or self.error <= MAX_ERROR)


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
        return f"{case.num_ranks} ranks, {case.link}, {100 * case.density:g} % dense, rows of {case.width}{masks}"

    @property
    def line(self) -> str:
        """The speed-ups."""
        return f"{self.name}: {', '.join(f'{arm.arm} {arm.speedup:.2f}x' for arm in self.arms)}"


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
            tx_bytes=statistics.median(map(statistics.mean, zip(*(rank.tx_bytes for rank in ranks), strict=True))),
            cpu_s=statistics.median(map(sum, zip(*(rank.cpu_s for rank in ranks), strict=True))),
            error=max(rank.error for rank in ranks),
            is_same=len({rank.digest for rank in ranks}) == 1,
        )


def missed(results: Sequence[CaseResult]) -> list[str]:
    """Sums that are not right, in words."""
    return [
        f"{arm.arm} with {result.name}: error {arm.error:.2g}, ranks {'alike' if arm.is_same else 'DIFFER'}"
        for result in results
        for arm in result.arms
        if not arm.is_right
    ]


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
    headings = ("", "ms", "range", "Mbit/s", "speed-up", "MB sent", "CPU ms", "error")
    tables = []
    for result in results:
        rows = [
            (
                arm.arm,
                f"{1e3 * arm.median_s:.1f}",
                f"{1e3 * arm.range_s[0]:.1f} - {1e3 * arm.range_s[1]:.1f}",
                f"{arm.throughput_mbit_s:,.0f}",
                f"{arm.speedup:.2f}",
                f"{1e-6 * arm.tx_bytes:.3f}",
                f"{1e3 * arm.cpu_s:.1f}",
                f"{arm.error:.1g}" if arm.is_same else "RANKS DIFFER",
            )
            for arm in result.arms
        ]
        tables.append(f"{result.name}\n{aligned(headings, rows)}")
    return "\n\n".join(tables)


def panels_of(results: Sequence[CaseResult], plan: ExchangePlan) -> list[list[Panel]]:
    """Throughput over density: a row for each number of ranks and width, a panel for each link and mask."""
    rows: dict[tuple[int, int], list[Panel]] = {}
    for num_ranks, width, link, mask in itertools.product(plan.ranks, plan.widths, plan.links, plan.masks):
        chosen = [  # a dense gradient has any mask
            result
            for result in results
            if (result.case.num_ranks, result.case.width, result.case.link) == (num_ranks, width, link)
            and (result.case.mask == mask or result.case.density == 1)
        ]
        panel = Panel(
            title=f"{num_ranks} ranks, {link}, {mask} masks, rows of {width}",
            x="per cent dense",
            y="Mbit/s of the dense gradient",
            logarithmic=True,
            curves=[Curve(label=name, points=_points(chosen, name)) for name in plan.rank.arms],
        )
        rows.setdefault((num_ranks, width), []).append(panel)
    return list(rows.values())


def _points(results: Sequence[CaseResult], name: str) -> list[tuple[float, float]]:
    """Per cent dense and throughput of one arm."""
    return sorted(
        (100 * result.case.density, arm.throughput_mbit_s)
        for result in results
        for arm in result.arms
        if arm.arm == name
    )
