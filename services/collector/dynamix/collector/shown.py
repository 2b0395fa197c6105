"""Metrics of the collector: the newest window of each job, and the cost of its probe."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Protocol

from dynamix.runtime.metrics import LabelTable, Scrape, ServiceMetrics
from dynamix.schemas.messages import MetricWindow, RankMetrics

from .ebpf.syscall import ProgramInfo

COUNTERS = {
    "windows": "metric windows made of reports",
    "windows_shed": "metric windows dropped since the stream FEED was full",
    "refused_pids": "reported processes that were not what their rank said",
}
GAUGES = {
    "ebpf": "1 while the eBPF probe is attached",
    "reports_pending": "reports that waited in the broker behind those that were read last",
}
MAX_RANKS = 64
"""Ranks of one job and node that are shown one by one; beyond it the first ones."""
STATS_ENABLED = Path("/proc/sys/kernel/bpf_stats_enabled")

JOB_METRICS = {
    "global_batch_size": ("job_global_batch_size", "samples of a step, all ranks"),
    "step_time_s": ("job_step_time_seconds", "mean time of a step, slowest rank"),
    "throughput": ("job_throughput_samples_per_second", "samples per second of training time"),
    "loss": ("job_loss", "mean training loss of the window"),
    "accuracy": ("job_accuracy_ratio", "training accuracy of the window"),
    "held_out_accuracy": ("job_held_out_accuracy_ratio", "newest evaluation that the script reported"),
    "progress": ("job_progress_ratio", "share of the planned samples seen"),
    "noise_scale": ("job_noise_scale_samples", "gradient noise scale B_noise"),
}
"""Fields of `GlobalMetrics`: the same numbers from every node's collector."""


class ProbeCost(Protocol):
    """The part of a probe that is used here: see `ebpf.probe.SocketProbe`."""

    def cost(self) -> dict[str, ProgramInfo]:
        """The kernel's statistics of each program."""


class ShownWindows:
    """Keeps the newest window of each job of this node for the metrics."""

    def __init__(self, metrics: ServiceMetrics, probe: ProbeCost | None = None) -> None:
        self._windows: LabelTable[str, MetricWindow] = LabelTable()
        self._probe = probe
        metrics.declare(counters=COUNTERS, gauges=GAUGES)
        metrics.add(self.show)

    def record(self, window: MetricWindow) -> None:
        """Keep a window; the newest of its job is shown."""
        self._windows.record(window.job, window)

    def show(self, scrape: Scrape) -> None:
        """Show all that is kept."""
        scrape.gauge("processors", "processors of the machine", os.cpu_count())
        if self._probe is not None:
            _show_cost(scrape, self._probe, STATS_ENABLED)
        for entry in self._windows.entries():
            _show_window(scrape, entry.value, entry.age_s)
        scrape.counter("jobs_not_shown", "jobs left out since too many are active", self._windows.num_evicted)


def _show_cost(scrape: Scrape, probe: ProbeCost, stats_enabled: Path) -> None:
    """Cost of the probe's programs; the kernel counts it while the sysctl kernel.bpf_stats_enabled is 1."""
    with suppress(OSError):  # the probe was closed meanwhile: the service stops
        programs = probe.cost().values()
        measured = int(_is_counted(stats_enabled))
        scrape.gauge("probe_cost_measured", "1 while the kernel counts what the probe costs", measured)
        seconds = sum(program.run_time_ns for program in programs) / 1e9
        scrape.counter("probe_cost_seconds", "processor time of the probe's programs in the kernel", seconds)
        scrape.counter("probe_runs", "runs of the probe's programs", sum(program.num_runs for program in programs))


def _is_counted(stats_enabled: Path) -> bool:
    try:
        return stats_enabled.read_text().strip() == "1"
    except OSError:  # not readable in this container
        return False


def _show_window(scrape: Scrape, window: MetricWindow, age_s: float) -> None:
    job = window.job
    scrape.gauge("job_generation", "restarts of the job", window.generation, training_job=job)
    scrape.gauge("job_window", "index of the newest window", window.window, training_job=job)
    scrape.gauge("job_window_age_seconds", "since this collector made it", age_s, training_job=job)
    for field, (name, meaning) in JOB_METRICS.items():
        scrape.gauge(name, meaning, getattr(window.job_metrics, field), training_job=job)
    energy = "joules of all ranks' devices in the newest window, in jobs that measure them"
    scrape.gauge("job_energy_joules", energy, window.energy_j, training_job=job)
    scrape.gauge("job_probe", "always 1; where network metrics come from", 1, training_job=job, probe=window.probe)
    scrape.gauge(
        "job_reports_dropped",
        "reports that this node's ranks dropped without a broker, in this generation",
        window.num_reports_dropped,
        training_job=job,
    )
    for rank in window.ranks[:MAX_RANKS]:
        _show_rank(scrape, job, rank)
    scrape.gauge(
        "job_ranks_not_shown", "ranks of this node left out", max(0, len(window.ranks) - MAX_RANKS), training_job=job
    )
    scrape.gauge("job_ranks", "ranks of this node", len(window.ranks), training_job=job)
    scrape.gauge(
        "job_sync_ratio",
        "share of a step spent waiting for slower ranks and for the all-reduce, mean over this node's ranks",
        _mean(_sync_share(rank) for rank in window.ranks),
        training_job=job,
    )


def _show_rank(scrape: Scrape, job: str, metrics: RankMetrics) -> None:
    training, system, network = metrics.training, metrics.system, metrics.network
    labels = {"training_job": job, "rank": str(metrics.rank)}
    scrape.gauge("rank_local_batch_size", "samples of a step", training.local_batch_size, **labels)
    times = "mean time of a step, by part"
    for part in ("compute", "sync", "data", "update"):
        scrape.gauge("rank_time_seconds", times, getattr(training, f"{part}_time_s"), **labels, part=part)
    scrape.gauge("rank_cpu_ratio", "processor seconds per second", system.cpu_time_ratio, **labels)
    scrape.gauge("rank_memory_bytes", "resident memory", system.memory_bytes, **labels)
    if network is not None:
        scrape.gauge("rank_tx_bytes", "acknowledged bytes sent in the newest window", network.tx_bytes, **labels)
        scrape.gauge("rank_retransmits", "retransmitted segments in the newest window", network.retransmits, **labels)


def _sync_share(rank: RankMetrics) -> float | None:
    training = rank.training
    if training.sync_time_s is None or training.step_time_s <= 0:
        return None
    return training.sync_time_s / training.step_time_s


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
