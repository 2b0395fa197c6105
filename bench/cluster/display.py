"""Results of bench.cluster for people: a table and the panels of a figure for each run."""

import math
from collections.abc import Sequence

from bench.cluster.plan import ClusterPlan
from bench.cluster.summary import ClusterResult, RankResult
from bench.harness.figure import Curve, Panel
from bench.harness.tables import aligned, number

COLUMNS = (
    ("batch", "local_batch_size", 1.0, 0),
    ("compute ms", "compute_time_s", 1e3, 1),
    ("sync ms", "sync_time_s", 1e3, 1),
    ("tx MB/s", "tx_bytes_per_s", 1e-6, 2),
    ("rx MB/s", "rx_bytes_per_s", 1e-6, 2),
    ("retransmits per window", "retransmits", 1.0, 0),
    ("srtt ms", "srtt_us", 1e-3, 2),
    ("link MB/s", "link_bytes_per_s", 1e-6, 2),
    ("CPU time ratio", "cpu_time_ratio", 1.0, 3),
    ("run-queue wait ratio", "run_queue_wait_ratio", 1.0, 3),
)
"""Heading, signal, scale and digits."""
NOT_DRAWN = ("local_batch_size", "tx_bytes_per_s")


def describe(plan: ClusterPlan) -> str:
    """What is slow, in words."""
    parts = [f"{plan.num_hosts} hosts" + ("" if plan.cores is None else f" of {plan.cores:g} cores")]
    parts += [f"rank {rank} has {cores:g} cores" for rank, cores in sorted(plan.slow_cpus.items())]
    limit = "" if plan.queue_limit_bytes is None else f", queues of {plan.queue_limit_bytes} bytes"
    parts += [f"rank {rank}'s link has {rate}{limit}" for rank, rate in sorted(plan.slow_links.items())]
    return "; ".join(parts)


def text_of(result: ClusterResult) -> str:
    """One run."""
    step, throughput = result.step_time_s, result.throughput
    counts = (
        f"{result.num_windows} of {result.num_windows_planned} windows, {result.num_actions} actions, "
        f"{result.num_actions_applied} applied"
    )
    title = (
        f"{result.label}: step {1e3 * step.median:.1f} ms [{1e3 * step.low:.1f}, {1e3 * step.high:.1f}], "
        f"{throughput.median:.0f} samples/s [{throughput.low:.0f}, {throughput.high:.0f}] "
        f"(median and quartiles of windows); {counts}"
    )
    ranks = aligned(["rank", *(heading for heading, *_ in COLUMNS), "probe"], [_cells(rank) for rank in result.ranks])
    pairs = ", ".join(f"{rank.num_retransmits} of {rank.host_retransmits}" for rank in result.ranks)
    notes = [f"probe: {note}" for note in sorted({note for rank in result.ranks for note in rank.probe_notes})]
    spreads = result.step_time_s_by_exchange
    if len(spreads) > 1:
        notes += [
            f"step with gradients {exchange}: {1e3 * spread.median:.1f} ms [{1e3 * spread.low:.1f}, "
            f"{1e3 * spread.high:.1f}]"
            for exchange, spread in spreads.items()
        ]
    counted = f"retransmitted segments, by the windows and by all sockets of each host: {pairs}"
    return "\n".join([title, ranks, counted, *notes])


def _cells(rank: RankResult) -> list[str]:
    probes = " ".join(f"{probe}:{count}" for probe, count in sorted(rank.probes.items()))
    return [str(rank.rank), *(scaled(rank.medians[name], scale, digits) for _, name, scale, digits in COLUMNS), probes]


def scaled(value: float | None, scale: float, digits: int) -> str:
    """A figure in the unit of its column; `-` when it is not known."""
    return number(None if value is None else value * scale, digits).replace(",", "")


def panels_of(results: Sequence[ClusterResult], plan: ClusterPlan) -> list[list[Panel]]:
    """Step time of every run, and below it a row per signal with a column per run."""
    steps = [_curve(result.label, result.step_times_s, 1e3) for result in results]
    title = "Step time; shaded: not measured"
    first = Panel(title=title, x="window", y="ms", curves=steps, shaded_until=plan.num_warm_up_windows - 0.5)
    signals = [column for column in COLUMNS if column[1] not in NOT_DRAWN]
    return [[first], *([_panel(result, *column[:3]) for result in results] for column in signals)]


def _panel(result: ClusterResult, heading: str, signal: str, scale: float) -> Panel:
    curves = [_curve(f"rank {rank.rank}", rank.windows[signal], scale) for rank in result.ranks]
    return Panel(title=f"{heading}, {result.label}", x="window", y=heading, curves=curves)


def _curve(label: str, values: Sequence[float | None], scale: float) -> Curve:
    points = [(float(at), math.nan if value is None else value * scale) for at, value in enumerate(values)]
    return Curve(label=label, points=points, style="-")
