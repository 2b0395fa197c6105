"""Shared parts of figures: colours, the sizes of all ranks, and the file."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.runtime.output_files import whole

from .output import writing

Place = Literal["mid", "post"]
"""A step lies around `x`, or goes from it to the next."""
COLOURS = ("#4c72b0", "#55a868", "#8172b3", "#c44e52", "#ccb974", "#64b5cd", "#937860", "#da8bc3")
SINGLE_RANKS = 16
"""The range of more ranks is drawn, since their lines would hide each other."""


def save(figure: Figure, path: str) -> None:
    """Write a PNG. Raises CommandError when that cannot be."""
    with writing(path), whole(Path(path)) as file:
        figure.savefig(file, dpi=130, format="png")


def finish(axes: Axes, *, from_zero: bool = True, beside: float = 0.0, **labels: str) -> None:
    """Labels, a grid, and a legend where there is something to name: in a corner, or `beside` the axes."""
    axes.set(**labels)
    if from_zero:
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        place: dict[str, Any] = (
            {"loc": "center left", "bbox_to_anchor": (beside, 0.5)} if beside else {"loc": "upper left"}
        )
        axes.legend(fontsize="small", **place)
    axes.grid(alpha=0.3)


def draw_sizes(axes: Axes, x: Sequence[float], by_rank: Sequence[Sequence[float]], where: Place) -> None:
    """Local batch sizes over `x`, a row for each rank; ranks with equal sizes share a line."""
    if len(by_rank) <= SINGLE_RANKS:
        alike: dict[tuple[float, ...], list[int]] = {}
        for rank, sizes in enumerate(by_rank):
            alike.setdefault(tuple(sizes), []).append(rank)
        for line, ranks in alike.items():
            label = f"rank {', '.join(map(str, ranks))}"
            axes.step(x, line, where=where, label=label, color=COLOURS[ranks[0] % len(COLOURS)])
        return
    low, high, middle = (_each(by_rank, of) for of in (min, max, statistics.median))
    axes.fill_between(x, low, high, step=where, alpha=0.35, label=f"all {len(by_rank)} ranks")
    axes.step(x, middle, where=where, color=COLOURS[0], label="median")


def _each(by_rank: Sequence[Sequence[float]], of: Callable[[list[float]], float]) -> list[float]:
    """A function of the known sizes at each place; NaN where none is known."""
    known = ([size for size in sizes if not math.isnan(size)] for sizes in zip(*by_rank, strict=True))
    return [of(sizes) if sizes else math.nan for sizes in known]
