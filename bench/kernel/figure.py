"""The picture of bench.kernel: nanoseconds a run under each kind of traffic, and what each arm adds from outside."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.figure import new_figure, save

from dynamix.collector.ebpf.program import INGRESS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLOCK = "CPU time"
MAX_NS_PER_RUN = 200.0
"""The target of a run of cgroup_skb."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write a PNG."""
    comparisons = figures["arms"]
    figure = new_figure(6 + 3 * len(comparisons), 4.5)
    grid = figure.add_gridspec(1, 2 + len(comparisons))
    _run_times(figure.add_subplot(grid[0, :2]), figures["run_times"])
    for column, comparison in enumerate(comparisons, start=2):
        _arms(figure.add_subplot(grid[0, column]), comparison)
    save(figure, path)


def _run_times(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    names = [f"{row['name']}\n{row['machine_percent']:.2f} % of the machine" for row in rows]
    axes.barh(names, [row["programs"][INGRESS]["ns_per_run"] or 0.0 for row in rows], color="#4c72b0", label="probe")
    axes.barh(names, [row["empty_ns"] or 0.0 for row in rows], color="#bbbbbb", label="a program that does nothing")
    axes.axvline(MAX_NS_PER_RUN, color="#c44e52", linestyle="--", label="target")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set(title="A run of cgroup_skb, by the kernel's clock", xlabel="ns")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _arms(axes: "Axes", comparison: dict[str, Any]) -> None:
    """Every round, and the quartiles of all."""
    differences = comparison["clocks"][CLOCK]
    labels = [f"{row['arm']} -\n{row['against']}" for row in differences]
    axes.boxplot([row["rounds_percent"] for row in differences], tick_labels=labels, showfliers=False)
    for place, row in enumerate(differences, start=1):
        axes.plot([place] * len(row["rounds_percent"]), row["rounds_percent"], ".", color="#4c72b0", alpha=0.5)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.tick_params(axis="x", labelsize="xx-small")
    name = comparison["name"].replace(", ", ",\n")
    axes.set_title(f"{name}:\n{CLOCK} per {comparison['item']} [%]", fontsize="small")
    axes.grid(axis="y", alpha=0.3)
