"""Results of bench.cluster for people: progress, and a table for each run."""

import sys
import time

from bench.cluster.plan import Arm, Plan
from bench.cluster.seen import Watcher
from bench.cluster.summary import RankResult, Result

from dynamix.schemas.messages import MetricWindow

LINE_EVERY_S = 3.0
UNKNOWN = "-"
COLUMNS = (
    ("batch", "local_batch_size", 1.0, 0),
    ("compute ms", "compute_time_s", 1e3, 1),
    ("sync ms", "sync_time_s", 1e3, 1),
    ("tx MB/s", "tx_bytes_per_s", 1e-6, 2),
    ("rx MB/s", "rx_bytes_per_s", 1e-6, 2),
    ("retr./window", "retransmits", 1.0, 0),
    ("srtt ms", "srtt_us", 1e-3, 2),
    ("CPU", "cpu_time_ratio", 1.0, 3),
    ("run-q. wait", "run_queue_wait_ratio", 1.0, 3),
)
"""Heading, signal, scale and digits."""


def describe(plan: Plan) -> str:
    """What is slow, in words."""
    parts = [f"{plan.num_hosts} hosts" + ("" if plan.cores is None else f" of {plan.cores:g} cores")]
    parts += [f"rank {rank} has {cores:g} cores" for rank, cores in sorted(plan.slow_cpus.items())]
    limit = "" if plan.queue_limit_bytes is None else f", queues of {plan.queue_limit_bytes} bytes"
    parts += [f"rank {rank}'s link has {rate}{limit}" for rank, rate in sorted(plan.slow_links.items())]
    return "; ".join(parts)


def progress(plan: Plan, arm: Arm) -> Watcher:
    """Lines on standard error, not too many."""
    last_s = 0.0

    def watch(windows: dict[int, MetricWindow], num_applied: int) -> None:
        nonlocal last_s
        window = windows[0]
        if time.monotonic() - last_s < LINE_EVERY_S and window.window + 1 < plan.num_windows:
            return
        last_s = time.monotonic()
        sizes = "/".join(str(window.ranks[0].training.local_batch_size) for _, window in sorted(windows.items()))
        step_ms = 1e3 * window.job_metrics.step_time_s
        sys.stderr.write(
            f"  {arm.label}: window {window.window + 1} of {plan.num_windows}, {sizes}, {step_ms:.0f} ms, "
            f"{num_applied} actions applied\n"
        )

    return watch


def print_result(result: Result) -> None:
    """One run."""
    step, throughput = result.step_time_s, result.throughput
    print(
        f"\n{result.label}: step {1e3 * step.median:.1f} ms [{1e3 * step.low:.1f}, {1e3 * step.high:.1f}], "
        f"{throughput.median:.0f} samples/s [{throughput.low:.0f}, {throughput.high:.0f}] "
        f"(median and quartiles of windows); {result.num_windows} of {result.num_windows_planned} windows, "
        f"{result.num_actions} actions, {result.num_actions_applied} applied"
    )
    print(f"{'rank':>4}" + "".join(f"{heading:>13}" for heading, *_ in COLUMNS) + f"{'probe':>20}")
    for rank in result.ranks:
        cells = [_cell(rank.medians[signal], scale, digits) for _, signal, scale, digits in COLUMNS]
        print(f"{rank.rank:>4}" + "".join(f"{cell:>13}" for cell in cells) + f"{_probes(rank):>20}")
    _print_retransmits(result)


def _print_retransmits(result: Result) -> None:
    pairs = ", ".join(f"{rank.num_retransmits} of {rank.host_retransmits}" for rank in result.ranks)
    print(f"segments sent again, by the windows and by all sockets of each host: {pairs}")
    for note in sorted({note for rank in result.ranks for note in rank.probe_notes}):
        print(f"probe: {note}")


def _probes(rank: RankResult) -> str:
    return " ".join(f"{probe}:{count}" for probe, count in sorted(rank.probes.items()))


def _cell(value: float | None, scale: float, digits: int) -> str:
    return UNKNOWN if value is None else f"{value * scale:.{digits}f}"
