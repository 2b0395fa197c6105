import pytest
from tests.support import examples

from dynamix.collector.window import simulated_window
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import NodeMetrics, SystemMetrics

SYSTEMS = (SystemMetrics(cpu_time_ratio=0.9, memory_ratio=0.25), SystemMetrics(cpu_time_ratio=0.4))


def test_a_virtual_clusters_window_holds_only_the_reports_values() -> None:
    sockets = {"sockets": examples.sockets(3000, 2000), "sockets_before": examples.sockets(1000, 500)}
    rows = (
        examples.row(0, pid=1, **sockets),
        examples.row(1, pid=1, **sockets),
    )  # pid 1 runs here, and is not looked at
    window = simulated_window(examples.report(rows=rows, simulated=SYSTEMS))
    assert tuple(rank.system for rank in window.ranks) == SYSTEMS
    assert window.node_metrics == NodeMetrics()
    assert window.refused_pids == ()
    assert window.probe == "tcp_info"
    assert window.ranks[0].network is not None
    assert (window.ranks[0].network.tx_bytes, window.ranks[0].network.rx_bytes) == (2000, 1500)


def test_a_virtual_worker_alone_has_no_network() -> None:
    window = simulated_window(examples.report(rows=(examples.row(0),), simulated=SYSTEMS[:1]))
    assert (window.probe, window.ranks[0].network) == ("none", None)


def test_simulated_metrics_that_do_not_fit_the_rows_are_refused() -> None:
    with pytest.raises(MalformedMessageError, match="1 simulated processes for 2 rows"):
        simulated_window(examples.report(rows=(examples.row(0), examples.row(1)), simulated=SYSTEMS[:1]))
