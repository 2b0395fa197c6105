"""The figures for people."""

from typing import Any

from bench.harness.tables import aligned, number

from dynamix.collector.ebpf.program import INGRESS, SOCKETS

MIB = 1 << 20


def text_of(summary: dict[str, Any]) -> str:
    """All tables."""
    others = summary["others_attached"]
    return "\n\n".join(
        [
            *([f"programs of others on all sockets, before and after: {others}"] if any(others) else []),
            _run_times(summary["run_times"]),
            *map(_arms, summary["arms"]),
            _memory(summary["memory"]),
            _reading(summary["reading"]),
        ]
    )


def _run_times(rows: list[dict[str, Any]]) -> str:
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


def _arms(comparison: dict[str, Any]) -> str:
    headings = ["", "without", "with", "median %", "quartiles", "mean %", "95 % interval"]
    rows = [
        [
            f"{clock}, {row['arm']} against {row['against']}",
            f"{row['against_median_ms']:.4g}",
            f"{row['median_ms']:.4g}",
            f"{row['median_percent']:+.2f}",
            _range(row["quartiles_percent"]),
            f"{row['mean_percent']:+.2f}",
            _range(row["interval_percent"]),
        ]
        for clock, differences in comparison["clocks"].items()
        for row in differences
    ]
    title = f"{comparison['name']}, ms per {comparison['item']}, {comparison['num_rounds']} rounds:"
    return f"{title}\n{aligned(headings, rows)}"


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


def _range(bounds: list[float]) -> str:
    low, high = bounds
    return f"[{low:+.2f}, {high:+.2f}]"
