"""The figures of bench.kernel for people: tables, and a picture of a run's time and of what each arm adds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.figure import new_figure, save
from bench.harness.tables import aligned, formatted, number

from dynamix.collector.ebpf.program import INGRESS, SOCKETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20
CLOCK = "CPU time"
MAX_NS_PER_RUN = 200.0
"""The target of a run of cgroup_skb."""
COLUMNS = {
    "": "{clock}, {arm} against {against}",
    "without": "{against_median_ms:.4g}",
    "with": "{median_ms:.4g}",
    "median %": "{median_percent:+.2f}",
    "quartiles": "[{quartiles_percent[0]:+.2f}, {quartiles_percent[1]:+.2f}]",
    "mean %": "{mean_percent:+.2f}",
    "95 % interval": "[{interval_percent[0]:+.2f}, {interval_percent[1]:+.2f}]",
}
"""Columns of the table of arms."""


def text_of(summary: dict[str, Any]) -> str:
    """All tables."""
    others = summary["others_attached"]
    return "\n\n".join(
        [
            *([f"programs of others on all sockets, before and after: {others}"] if any(others) else []),
            _run_times_table(summary["run_times"]),
            *map(_arms_table, summary["arms"]),
            _memory(summary["memory"]),
            _reading(summary["reading"]),
        ]
    )


def _run_times_table(rows: list[dict[str, Any]]) -> str:
    headings = ["by the kernel, while", "rate", "skb runs/s", "ns", "(empty", "net)", "sock_ops/s", "ns", "% machine"]
    note = "ns: between the kernel's two looks at the clock; what it takes to get to the program is not in it"
    return f"{aligned(headings, [_run_times_row(row) for row in rows])}\n{note}"


def _run_times_row(row: dict[str, Any]) -> list[str]:
    skb, ops = row["programs"][INGRESS], row["programs"][SOCKETS]
    net = None if skb["ns_per_run"] is None or row["empty_ns"] is None else skb["ns_per_run"] - row["empty_ns"]
    return [
        row["name"],
        f"{_rate(row['items_per_s'])} {row['item']}/s",
        number(skb["runs_per_s"], 0),
        *(number(value, 0) for value in (skb["ns_per_run"], row["empty_ns"], net)),
        number(ops["runs_per_s"], 0),
        number(ops["ns_per_run"], 0),
        number(row["machine_percent"], 3),
    ]


def _arms_table(comparison: dict[str, Any]) -> str:
    rows = [{"clock": clock, **row} for clock, differences in comparison["clocks"].items() for row in differences]
    title = f"{comparison['name']}, ms per {comparison['item']}, {comparison['num_rounds']} rounds:"
    return f"{title}\n{formatted(rows, COLUMNS)}"


def _memory(memory: dict[str, Any]) -> str:
    loader, maps = memory["loader"], memory["maps_bytes"]
    found = (
        f"  collector, {probe}: {' '.join(number(value / MIB, 1) for value in values)} MiB resident"
        for probe, values in memory["collector_bytes"].items()
    )
    peak = f"{loader['peak_bytes'] / MIB:.0f} MiB at most"
    compiling = f"  process that compiles: {peak}, for {loader['wall_s']:.2f} s ({loader['cpu_s']:.2f} s of CPU)"
    sizes = ", ".join(f"{name} {value / MIB:.2f}" for name, value in maps.items())
    in_kernel = f"  maps, in the kernel: {sum(maps.values()) / MIB:.1f} MiB ({sizes})"
    return "\n".join(["memory", *found, compiling, in_kernel])


def _reading(reading: dict[str, Any]) -> str:
    windows = (
        f"a window of {window['num_ranks']} ranks x {window['sockets_per_rank']} sockets: {window['window_us']:.0f} us"
        for window in reading["windows"]
    )
    return "\n".join([f"reading a socket: {reading['socket_us']:.2f} us", *windows])


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write a PNG."""
    comparisons = figures["arms"]
    figure = new_figure(6 + 3 * len(comparisons), 4.5)
    grid = figure.add_gridspec(1, 2 + len(comparisons))
    _draw_run_times(figure.add_subplot(grid[0, :2]), figures["run_times"])
    for column, comparison in enumerate(comparisons, start=2):
        _draw_arms(figure.add_subplot(grid[0, column]), comparison)
    save(figure, path)


def _draw_run_times(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    names = [f"{row['name']}\n{row['machine_percent']:.2f} % of the machine" for row in rows]
    axes.barh(names, [row["programs"][INGRESS]["ns_per_run"] or 0.0 for row in rows], color="#4c72b0", label="probe")
    axes.barh(names, [row["empty_ns"] or 0.0 for row in rows], color="#bbbbbb", label="a program that does nothing")
    axes.axvline(MAX_NS_PER_RUN, color="#c44e52", linestyle="--", label="target")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set(title="A run of cgroup_skb, by the kernel's clock", xlabel="ns")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _draw_arms(axes: "Axes", comparison: dict[str, Any]) -> None:
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
