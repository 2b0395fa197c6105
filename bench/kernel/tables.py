"""The figures for people."""

from typing import Any

from dynamix.collector.ebpf.program import INGRESS, SOCKETS

MIB = 1 << 20


def print_tables(summary: dict[str, Any]) -> None:
    """All of them."""
    loads = " to ".join(f"{load:.1f}" for load in summary["load_average"])
    print(f"\n{summary['num_processors']} processors, kernel {summary['kernel']}, load average {loads}")
    if any(summary["others_attached"]):
        print(f"programs of others on all sockets, before and after: {summary['others_attached']}")
    _print_run_times(summary["run_times"])
    for comparison in summary["arms"]:
        _print_arms(comparison)
    _print_memory(summary["memory"])
    _print_reading(summary["reading"])
    print()
    for target in summary["targets"]:
        _print_target(target)


def _print_run_times(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'by the kernel, while':36}{'rate':>22}{'skb runs/s':>12}{'ns':>7}{'(empty':>8}{'net)':>7}", end="")
    print(f"{'sock_ops/s':>12}{'ns':>7}{'% machine':>11}")
    for row in rows:
        skb, ops = row["programs"][INGRESS], row["programs"][SOCKETS]
        net = None if skb["ns_per_run"] is None or row["empty_ns"] is None else skb["ns_per_run"] - row["empty_ns"]
        rate = f"{_number(row['items_per_s'])} {row['item']}/s"
        print(f"  {row['name']:34}{rate:>22}{skb['runs_per_s']:12,.0f}{_ns(skb['ns_per_run']):>7}", end="")
        print(f"{_ns(row['empty_ns']):>8}{_ns(net):>7}{ops['runs_per_s']:12,.0f}{_ns(ops['ns_per_run']):>7}", end="")
        print(f"{row['machine_percent']:11.3f}")
    print("  ns: between the kernel's two looks at the clock; what it takes to get to the program is not in it")


def _print_arms(comparison: dict[str, Any]) -> None:
    print(f"\n{comparison['name']}, ms per {comparison['item']}, {comparison['num_rounds']} rounds:")
    print(f"  {'':40}{'without':>10}{'with':>10}{'median %':>10}{'quartiles':>18}{'mean %':>8}{'95 % interval':>18}")
    for clock, differences in comparison["clocks"].items():
        for row in differences:
            label = f"{row['arm']} against {row['against']}"
            print(f"  {clock:12}{label:28}{row['against_median_ms']:10.4g}{row['median_ms']:10.4g}", end="")
            print(f"{row['median_percent']:+10.2f}{_range(row['quartiles_percent']):>18}", end="")
            print(f"{row['mean_percent']:+8.2f}{_range(row['interval_percent']):>18}")


def _print_memory(memory: dict[str, Any]) -> None:
    loader, maps = memory["loader"], memory["maps_bytes"]
    print("\nmemory")
    for probe, found in memory["collector_bytes"].items():
        print(f"  {f'collector, {probe}':34}{' '.join(f'{value / MIB:.1f}' for value in found)} MiB resident")
    print(f"  {'process that compiles':34}{loader['peak_bytes'] / MIB:.0f} MiB at most", end="")
    print(f", for {loader['wall_s']:.2f} s ({loader['cpu_s']:.2f} s of CPU)")
    sizes = ", ".join(f"{name} {value / MIB:.2f}" for name, value in maps.items())
    print(f"  {'maps, in the kernel':34}{sum(maps.values()) / MIB:.1f} MiB ({sizes})")


def _print_reading(reading: dict[str, Any]) -> None:
    print(f"\nreading a socket: {reading['socket_us']:.2f} us")
    for window in reading["windows"]:
        size = f"{window['num_ranks']} ranks x {window['sockets_per_rank']} sockets"
        print(f"a window of {size}: {window['window_us']:.0f} us")


def _print_target(target: dict[str, Any]) -> None:
    sign, limit = ("<=", target["at_most"]) if "at_most" in target else (">=", target["at_least"])
    verdict = "met" if target["met"] else "MISSED"
    print(f"{target['name']}: {_number(target['value'])}, target {sign} {limit:g}: {verdict}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ns(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _range(bounds: list[float]) -> str:
    low, high = bounds
    return f"[{low:+.2f}, {high:+.2f}]"
