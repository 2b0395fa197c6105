"""Makes the metric window from a report and the kernel's readings. Pure: sums become means here, once.

Network metrics come from the first probe that knows the window: eBPF counts every socket that a rank names, TCP_INFO is
what the ranks read of their own sockets, /proc counts a whole network namespace.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import (
    GlobalMetrics,
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    Probe,
    RankMetrics,
    RankRow,
    Report,
    SystemMetrics,
    TrainingMetrics,
)

WantedProbe = Literal["auto", "ebpf", "tcp_info", "proc"]


class Traffic(NamedTuple):
    """Traffic of a node's ranks in a window, as one probe has it."""

    probe: Probe = "none"
    by_rank: Mapping[int, NetworkMetrics] = {}
    interval_s: float | None = None
    """Between two readings of the collector; `None` for what the ranks read themselves."""
    note: str = ""
    """Reason why no better probe was used."""


class Observation(NamedTuple):
    """Values of a metric window that are not in its report."""

    systems: Mapping[int, SystemMetrics] = {}
    """Process metrics by rank; a missing rank was not observed."""
    node: NodeMetrics = NodeMetrics()
    network: Traffic = Traffic()
    num_readings_lost: int = 0
    refused_pids: tuple[int, ...] = ()


def read_network(
    report: Report,
    node: NodeMetrics,
    wanted: WantedProbe = "auto",
    kernel: Traffic | str = "this collector has no eBPF probe",
) -> Traffic:
    """The traffic of a window by the first wanted probe that knows it, with the reasons of those that do not.

    `node` is what the collector read of the machine, `kernel` what eBPF counted, or why it did not.
    """
    reasons: list[str] = []
    for name, found in (("ebpf", kernel), ("tcp_info", _tcp_info(report)), ("proc", _namespace(report, node))):
        if wanted in ("auto", name):
            if not isinstance(found, str):
                return found._replace(note="; ".join(reasons))
            reasons.append(f"{name}: {found}")
    return Traffic(note="; ".join(reasons))


def _tcp_info(report: Report) -> Traffic | str:
    """Traffic as the ranks read it from their own sockets: exact per rank, unprivileged."""
    by_rank = {}
    for row in report.rows:
        now, before = row.sockets, row.sockets_before or NetworkMetrics(tx_bytes=0, rx_bytes=0, retransmits=0)
        if now is None:
            return f"rank {row.rank} has no TCP connection to another rank"
        by_rank[row.rank] = NetworkMetrics(
            tx_bytes=max(0, now.tx_bytes - before.tx_bytes),
            rx_bytes=max(0, now.rx_bytes - before.rx_bytes),
            retransmits=max(0, now.retransmits - before.retransmits),
            srtt_us=now.srtt_us,
        )
    return Traffic("tcp_info", by_rank)


def _namespace(report: Report, node: NodeMetrics) -> Traffic | str:
    """Counters of the whole network namespace: only where the node has a single rank."""
    if len(report.rows) != 1:
        return f"{len(report.rows)} ranks share the node's counters"
    if node.tx_bytes is None or node.rx_bytes is None or node.retransmits is None or node.interval_s is None:
        return "no two readings of consecutive windows"
    traffic = NetworkMetrics(tx_bytes=node.tx_bytes, rx_bytes=node.rx_bytes, retransmits=node.retransmits)
    return Traffic("proc", {report.rows[0].rank: traffic}, node.interval_s)


def metric_window(report: Report, seen: Observation) -> MetricWindow:
    """The metric window of a report; a rank without an entry in systems or network stays unknown there."""
    node, network = seen.node, seen.network
    totals, before = report.totals, report.totals_before
    loss, accuracy = _ratio(totals.loss_sum, totals.num_samples), _ratio(totals.num_correct, totals.num_samples)
    progress, noise, noise_scale = _ratio(report.samples_seen, report.total_samples), totals.noise, None
    if noise is not None and noise.squared_norm > 0 and noise.trace >= 0:  # else a smoothed moment is not positive
        noise_scale = _ratio(noise.trace, noise.squared_norm)  # B_noise = S / |G_true|^2 (method section 5.2)
    if network.interval_s is not None:
        node = msgspec.structs.replace(node, interval_s=network.interval_s)
    return MetricWindow(
        job=report.job,
        generation=report.generation,
        window=report.window,
        node=report.node,
        probe=network.probe,
        optimizer_family=report.optimizer_family,
        num_steps=totals.num_steps,
        ranks=tuple(
            RankMetrics(
                rank=row.rank,
                training=_training(row, totals.num_steps),
                system=seen.systems.get(row.rank, SystemMetrics()),
                network=network.by_rank.get(row.rank),
            )
            for row in report.rows
        ),
        job_metrics=GlobalMetrics(
            global_batch_size=totals.global_batch_size,
            num_samples=totals.num_samples,
            step_time_s=totals.time_s / max(1, totals.num_steps),
            throughput=_ratio(totals.num_samples, totals.time_s),
            loss=loss,
            loss_change=_difference(loss, None if before is None else _ratio(before.loss_sum, before.num_samples)),
            accuracy=accuracy,
            accuracy_change=_difference(
                accuracy, None if before is None else _ratio(before.num_correct, before.num_samples)
            ),
            held_out_accuracy=report.held_out_accuracy,
            progress=None if progress is None else min(1.0, progress),
            noise_scale=noise_scale,
            sigma_norm_sq=None if noise_scale is None else _ratio(noise_scale, totals.global_batch_size),
            learning_rate=totals.learning_rate,
            gradient_norm=totals.gradient_norm,
            coding_gain=totals.coding_gain,
        ),
        node_metrics=node,
        num_reports_dropped=report.num_reports_dropped,
        refused_pids=seen.refused_pids,
        probe_note=network.note,
        num_readings_lost=seen.num_readings_lost,
        stretch=report.stretch,
    )


def simulated_window(report: Report, probe: WantedProbe = "auto") -> MetricWindow:
    """The window of a virtual cluster's report, which says itself what a kernel would have shown.

    Raises:
        MalformedMessageError: when the metrics are not one per row.
    """
    if len(report.simulated) != len(report.rows):
        raise MalformedMessageError(
            f"{len(report.simulated)} simulated processes for {len(report.rows)} rows: there must be one for each"
        )
    network = read_network(report, NodeMetrics(), probe)._replace(note="")  # it has no better probe to speak of
    systems = {row.rank: system for row, system in zip(report.rows, report.simulated, strict=True)}
    return metric_window(report, Observation(systems, network=network))


def _training(row: RankRow, num_steps: int) -> TrainingMetrics:
    steps = max(1, num_steps)
    accuracy = _ratio(row.num_correct, row.num_samples)
    return TrainingMetrics(
        local_batch_size=row.local_batch_size,
        pending_local_batch_size=row.pending_local_batch_size,
        num_samples=row.num_samples,
        loss=_ratio(row.loss_sum, row.num_samples),
        accuracy=accuracy,
        accuracy_change=_difference(accuracy, row.accuracy_before),
        step_time_s=(row.data_time_s + row.compute_time_s + row.sync_time_s + row.update_time_s) / steps,
        compute_time_s=row.compute_time_s / steps if row.times_split else None,
        sync_time_s=row.sync_time_s / steps if row.times_split else None,
        data_time_s=row.data_time_s / steps,
        update_time_s=row.update_time_s / steps,
        link_bytes_per_s=row.link_bytes_per_s,
        link_peer=row.link_peer,
        waiting_time_s=None if row.waiting_time_s is None else row.waiting_time_s / steps,
    )


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; unknown without both, and where it is no longer finite."""
    if numerator is None or not denominator:
        return None
    quotient = numerator / denominator
    return quotient if math.isfinite(quotient) else None


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before
