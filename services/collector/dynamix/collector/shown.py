"""Metrics of the collector: the newest window of each job, and the cost of its probe."""

import os
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from dynamix.runtime.metrics import LabelTable, Scrape, ServiceMetrics
from dynamix.schemas.messages import MetricWindow

from .ebpf.probe import SocketProbe

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


class ShownWindows:
    """Keeps the newest window of each job of this node for the metrics."""

    def __init__(self, metrics: ServiceMetrics, probe: SocketProbe | None = None) -> None:
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
            with suppress(OSError):  # the probe was closed meanwhile: the service stops
                programs = self._probe.cost()
                seconds = sum(program.run_time_ns for program in programs) / 1e9
                scrape.counter("probe_cost_seconds", "processor time of the probe's programs in the kernel", seconds)
                num_runs = sum(program.num_runs for program in programs)
                scrape.counter("probe_runs", "runs of the probe's programs", num_runs)
            with suppress(OSError):  # not readable in this container
                measured = int(STATS_ENABLED.read_text().strip() == "1")
                scrape.gauge("probe_cost_measured", "1 while the kernel counts what the probe costs", measured)
        for _, window, age_s in self._windows.entries():
            _show_window(scrape, window, age_s)
        scrape.counter("jobs_not_shown", "jobs left out since too many are active", self._windows.num_evicted)


def _show_window(scrape: Scrape, window: MetricWindow, age_s: float) -> None:
    job = {"training_job": window.job}
    scrape.gauge("job_generation", "restarts of the job", window.generation, **job)
    scrape.gauge("job_window", "index of the newest window", window.window, **job)
    scrape.gauge("job_window_age_seconds", "since this collector made it", age_s, **job)
    for field, (name, meaning) in JOB_METRICS.items():
        scrape.gauge(name, meaning, getattr(window.job_metrics, field), **job)
    dropped = "reports that this node's ranks dropped without a broker, in this generation"
    scrape.gauge("job_reports_dropped", dropped, window.num_reports_dropped, **job)
    shares = [
        rank.training.sync_time_s / rank.training.step_time_s
        for rank in window.ranks
        if rank.training.sync_time_s is not None and rank.training.step_time_s > 0
    ]
    waiting = "share of a step spent waiting for slower ranks and for the all-reduce, mean over this node's ranks"
    scrape.gauge("job_sync_ratio", waiting, fmean(shares) if shares else None, **job)
    for rank in window.ranks[:MAX_RANKS]:
        training, network, labels = rank.training, rank.network, job | {"rank": str(rank.rank)}
        scrape.gauge("rank_local_batch_size", "samples of a step", training.local_batch_size, **labels)
        for part in ("compute", "sync", "data", "update"):
            time_s = getattr(training, f"{part}_time_s")
            scrape.gauge("rank_time_seconds", "mean time of a step, by part", time_s, **labels, part=part)
        scrape.gauge("rank_cpu_ratio", "processor seconds per second", rank.system.cpu_time_ratio, **labels)
        if network is not None:
            scrape.gauge("rank_tx_bytes", "acknowledged bytes sent in the newest window", network.tx_bytes, **labels)
            retransmits = "retransmitted segments in the newest window"
            scrape.gauge("rank_retransmits", retransmits, network.retransmits, **labels)
