"""The figure of an experiment: its panels side by side."""

from pathlib import Path

from matplotlib.figure import Figure

from dynamix.runtime.output_files import whole

from .result import Result

_COLOURS = ("#4c72b0", "#c44e52", "#0b6e4f", "#dd8452", "#8172b3", "#937860", "#da8bc3")


def draw(result: Result, path: Path) -> None:
    """Write a PNG of all panels."""
    figure = Figure(figsize=(5.5 * len(result.panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(result.panels), squeeze=False)
    for axes, panel in zip(grid[0], result.panels, strict=True):
        for number, curve in enumerate(panel.curves):
            xs, ys = zip(*curve.points, strict=True) if curve.points else ((), ())
            few = len(curve.points) <= 20
            axes.plot(xs, ys, marker="o" if few else "", markersize=3, label=curve.label, color=_colour(number))
        if panel.logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with whole(path) as file:
        figure.savefig(file, dpi=110, format="png")


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
