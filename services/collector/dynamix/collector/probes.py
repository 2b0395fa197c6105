"""Network probes: each gives the traffic of every rank of a node in one window, or the reason why it cannot.

A probe is chosen per window, the first in the order of `PROBES` that knows it; the window names it, and says why no
better one was used.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from dynamix.schemas.messages import NetworkMetrics, NodeMetrics, Probe, RankRow, Report, SocketCounters

from .ebpf.traffic import KernelWindow

WantedProbe = Literal["auto", "ebpf", "tcp_info", "proc"]


class Evidence(NamedTuple):
    """Network metrics of one window."""

    report: Report
    node: NodeMetrics
    kernel: KernelWindow | str = "this collector has no eBPF probe"
    """Counts of the eBPF probe for each socket that a rank names, also closed ones, or the reason why there are
    none."""


class Traffic(NamedTuple):
    """The readings of the chosen probe."""

    probe: Probe
    by_rank: Mapping[int, NetworkMetrics]
    interval_s: float | None
    """The collector's own interval, over which it was counted; `None` for what the ranks counted themselves."""
    note: str
    """Reason why no better probe was used."""


def tcp_info(evidence: Evidence) -> KernelWindow | str:
    """A window from the counters that the ranks read of their own sockets: exact per rank, unprivileged."""
    rows = evidence.report.rows
    silent = next((row.rank for row in rows if row.sockets is None), None)
    if silent is not None:
        return f"rank {silent} has no TCP connection to another rank"
    return KernelWindow({row.rank: _difference(row) for row in rows}, None)


def proc(evidence: Evidence) -> KernelWindow | str:
    """A window from the counters of the whole network namespace: only where the node has a single rank."""
    rows, node = evidence.report.rows, evidence.node
    if len(rows) != 1:
        return f"{len(rows)} ranks share the node's counters"
    if node.tx_bytes is None or node.rx_bytes is None or node.retransmits is None or node.interval_s is None:
        return "no two readings of consecutive windows"
    traffic = NetworkMetrics(tx_bytes=node.tx_bytes, rx_bytes=node.rx_bytes, retransmits=node.retransmits)
    return KernelWindow({rows[0].rank: traffic}, node.interval_s)


PROBES: Mapping[Probe, Callable[[Evidence], KernelWindow | str]] = {
    "ebpf": lambda evidence: evidence.kernel,
    "tcp_info": tcp_info,
    "proc": proc,
}


def read_network(evidence: Evidence, wanted: WantedProbe) -> Traffic:
    """The first wanted probe that knows this window, and its metrics; `none` if none does."""
    reasons: list[str] = []
    for name, probe in PROBES.items():
        if wanted in ("auto", name):
            found = probe(evidence)
            if not isinstance(found, str):
                return Traffic(name, found.by_rank, found.interval_s, "; ".join(reasons))
            reasons.append(f"{name}: {found}")
    return Traffic("none", {}, None, "; ".join(reasons))


def _difference(row: RankRow) -> NetworkMetrics:
    now, before = row.sockets, row.sockets_before or SocketCounters(tx_bytes=0, rx_bytes=0, retransmits=0)
    assert now is not None
    return NetworkMetrics(
        tx_bytes=max(0, now.tx_bytes - before.tx_bytes),
        rx_bytes=max(0, now.rx_bytes - before.rx_bytes),
        retransmits=max(0, now.retransmits - before.retransmits),
        srtt_us=now.srtt_us,
    )
