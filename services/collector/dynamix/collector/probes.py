"""Network probes: each gives the traffic of every rank of a node in one window, or nothing.

A probe is chosen per window, in the order of `PROBES`, and the window names it. An eBPF probe takes its place at the
head of that list.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from dynamix.schemas.messages import NetworkMetrics, NodeMetrics, Probe, RankRow, Report, SocketCounters

NetworkByRank = Mapping[int, NetworkMetrics]


class _NamedProbe(NamedTuple):
    name: Probe
    read: Callable[[Report, NodeMetrics], NetworkByRank | None]


def tcp_info(report: Report, node: NodeMetrics) -> NetworkByRank | None:  # noqa: ARG001 - a probe takes what there is
    """From the counters that the ranks read of their own sockets: exact per rank, unprivileged."""
    if any(row.sockets is None for row in report.rows):
        return None
    return {row.rank: _difference(row) for row in report.rows}


def proc(report: Report, node: NodeMetrics) -> NetworkByRank | None:
    """From the namespace's counters, whoever caused them: only where the node has a single rank."""
    if len(report.rows) != 1 or node.tx_bytes is None or node.rx_bytes is None or node.retransmits is None:
        return None
    traffic = NetworkMetrics(tx_bytes=node.tx_bytes, rx_bytes=node.rx_bytes, retransmits=node.retransmits)
    return {report.rows[0].rank: traffic}


PROBES = (_NamedProbe("tcp_info", tcp_info), _NamedProbe("proc", proc))


def read_network(
    report: Report, node: NodeMetrics, wanted: Literal["auto", "tcp_info", "proc"]
) -> tuple[Probe, NetworkByRank]:
    """The first wanted probe that knows this window, and what it says; (`none`, nothing) when none does."""
    for probe in PROBES:
        if wanted in ("auto", probe.name) and (found := probe.read(report, node)) is not None:
            return probe.name, found
    return "none", {}


def _difference(row: RankRow) -> NetworkMetrics:
    now, before = row.sockets, row.sockets_before or SocketCounters(tx_bytes=0, rx_bytes=0, retransmits=0)
    assert now is not None
    return NetworkMetrics(
        tx_bytes=max(0, now.tx_bytes - before.tx_bytes),
        rx_bytes=max(0, now.rx_bytes - before.rx_bytes),
        retransmits=max(0, now.retransmits - before.retransmits),
        srtt_us=now.srtt_us,
    )
