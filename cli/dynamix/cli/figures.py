"""Shared parts of figures: colours, labels, and the file."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.runtime.output_files import whole

from .output import writing

COLOURS = ("#4c72b0", "#55a868", "#8172b3", "#c44e52", "#ccb974", "#64b5cd", "#937860", "#da8bc3")


def save(figure: Figure, path: str) -> None:
    """Write a PNG. Raises CommandError when that cannot be."""
    with writing(path), whole(Path(path)) as file:
        figure.savefig(file, dpi=130, format="png")


def finish(axes: Axes, *, from_zero: bool = True, **labels: str) -> None:
    """Labels, a grid, and a legend where there is something to name."""
    axes.set(**labels)
    if from_zero:
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left")
    axes.grid(alpha=0.3)
