"""What is found of an arm whatever is exchanged: its gain, its cost, whether its result is right; as tables, too."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
from bench.exchange.plan import ALL_REDUCE, TORCH_SPARSE
from bench.exchange.rank import ArmTimings
from bench.harness.tables import aligned

LOSSLESS = (ALL_REDUCE, TORCH_SPARSE, "none", "rows", "sketch")


class MeasuredArm(msgspec.Struct, frozen=True, kw_only=True):
    """An arm of a case against the first one, which is PyTorch's all-reduce; an item is an exchange or a step."""

    max_error: ClassVar[float]
    """Error of arms without loss, which may add in another order than the all-reduce."""

    arm: str
    speedup: float
    """Items per second over the first arm's."""
    tx_bytes: float
    """Sent by a rank for an item: median over rounds of the mean over ranks."""
    cpu_s: float
    """CPU time of all ranks for an item, median."""
    error: float
    is_same: bool
    """Whether all ranks ended with the same bits."""

    @property
    def is_right(self) -> bool:
        """Whether all ranks have the same result, and without loss where none is allowed."""
        return self.is_same and (self.arm.partition("@")[0] not in LOSSLESS or self.error <= self.max_error)


A_co = TypeVar("A_co", bound=MeasuredArm, covariant=True)


class MeasuredCase(Protocol[A_co]):
    """A case with its arms."""

    @property
    def name(self) -> str:
        """The case in words."""

    @property
    def arms(self) -> Sequence[A_co]:
        """In the order of the plan."""


def figures_of(ranks: Sequence[ArmTimings], num_items: int = 1) -> dict[str, Any]:
    """What `MeasuredArm` says of an arm by itself, from the timings of all ranks with so many items in each round."""
    sent = map(statistics.mean, zip(*(rank.tx_bytes for rank in ranks), strict=True))
    spent = map(sum, zip(*(rank.cpu_s for rank in ranks), strict=True))
    return {
        "tx_bytes": statistics.median(sent) / num_items,
        "cpu_s": statistics.median(spent) / num_items,
        "error": max(rank.error for rank in ranks),
        "is_same": len({rank.digest for rank in ranks}) == 1,
    }


def speedups(result: MeasuredCase[MeasuredArm]) -> str:
    """A case in one line."""
    return f"{result.name}: {', '.join(f'{arm.arm} {arm.speedup:.2f}x' for arm in result.arms)}"


def missed(results: Sequence[MeasuredCase[MeasuredArm]]) -> list[str]:
    """Arms whose results are not right, in words."""
    return [
        f"{arm.arm} with {result.name}: error {arm.error:.2g}, ranks {'alike' if arm.is_same else 'DIFFER'}"
        for result in results
        for arm in result.arms
        if not arm.is_right
    ]


def tables(
    results: Sequence[MeasuredCase[A_co]], headings: Sequence[str], cells: Callable[[A_co], Sequence[str]]
) -> str:
    """A table for each case; `headings` and `cells` of an arm come before what is known of every arm."""
    all_headings = ("", *headings, "speed-up", "MB sent", "CPU ms", "error")
    return "\n\n".join(
        f"{result.name}\n{aligned(all_headings, [(arm.arm, *cells(arm), *_last_cells(arm)) for arm in result.arms])}"
        for result in results
    )


def _last_cells(arm: MeasuredArm) -> tuple[str, ...]:
    error = f"{arm.error:.1g}" if arm.is_same else "RANKS DIFFER"
    return f"{arm.speedup:.2f}", f"{1e-6 * arm.tx_bytes:.3f}", f"{1e3 * arm.cpu_s:.1f}", error
