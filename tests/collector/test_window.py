"""Windows: from reports of ranks, and from counters of sockets to the traffic of ranks."""

from typing import cast

import msgspec
import numpy as np
import pytest
from tests.support import examples

from dynamix.collector.ebpf.probe import Counters, SocketProbe
from dynamix.collector.observation import SocketTraffic
from dynamix.collector.window import (
    Observation,
    Traffic,
    metric_window,
    read_network,
    simulated_window,
)
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.features import RANK_INDEX, state_of, unpack_ranks
from dynamix.schemas.messages import GradientNoise, MetricWindow, NetworkMetrics, NodeMetrics, Report, SystemMetrics

NODE = NodeMetrics(load_per_cpu=0.5, tx_bytes=100, rx_bytes=200, retransmits=4, interval_s=1.0)


def window_of(report: Report) -> MetricWindow:
    return metric_window(report, Observation(node=NODE))


def test_sums_become_means_once() -> None:
    metrics = window_of(examples.report())
    training = metrics.ranks[0].training
    assert training.loss == 0.5
    assert training.accuracy == 0.75
    assert training.step_time_s == pytest.approx(0.1)
    assert training.compute_time_s == pytest.approx(0.05)
    parts = training.compute_time_s + training.sync_time_s + training.data_time_s + training.update_time_s
    assert parts == pytest.approx(training.step_time_s)
    assert metrics.job_metrics.throughput == 5120.0
    assert metrics.job_metrics.progress is None
    assert window_of(examples.report(total_samples=10240)).job_metrics.progress == 0.5
    assert metrics.job_metrics.step_time_s == pytest.approx(0.1)


def test_times_that_were_not_measured_separately_are_unknown_and_their_sum_is_kept() -> None:
    whole = examples.row(0, compute_time_s=0.8, sync_time_s=0.0, times_split=False)
    window = window_of(examples.report(rows=(whole, examples.row(1))))
    training = window.ranks[0].training
    assert (training.compute_time_s, training.sync_time_s) == (None, None)
    assert training.step_time_s == pytest.approx(0.1)
    assert (training.data_time_s, training.update_time_s) == pytest.approx((0.01, 0.01))
    features = unpack_ranks(state_of(window))
    columns = [RANK_INDEX[name] for name in ("compute_time_s", "sync_time_s")]
    assert np.isnan(features[0, columns]).all()
    assert features[1, columns] == pytest.approx([0.05, 0.03])


def test_changes_come_from_the_report_itself_so_that_the_collector_needs_no_memory() -> None:
    report = examples.report(
        window=1,
        rows=(examples.row(0, accuracy_before=0.70),),
        totals_before=examples.totals(0, loss_sum=5120.0, num_correct=2560.0),
    )
    metrics = window_of(report)
    assert metrics.ranks[0].training.accuracy_change == pytest.approx(0.05)
    assert metrics.job_metrics.loss_change == pytest.approx(-0.5)
    assert metrics.job_metrics.accuracy_change == pytest.approx(0.25)
    assert window_of(examples.report()).job_metrics.accuracy_change is None


def test_the_noise_scale_and_sigma_norm_are_those_of_the_method() -> None:
    metrics = window_of(examples.report()).job_metrics
    assert metrics.noise_scale == pytest.approx(100.0 / 0.05)
    assert metrics.sigma_norm_sq == pytest.approx(100.0 / (512 * 0.05))


@pytest.mark.parametrize(
    "noise", [None, GradientNoise(trace=1.0, squared_norm=0.0), GradientNoise(trace=1.0, squared_norm=-1.0)]
)
def test_the_noise_is_masked_while_it_drowns_the_signal(noise: GradientNoise | None) -> None:
    metrics = window_of(examples.report(totals=examples.totals(noise=noise))).job_metrics
    assert (metrics.noise_scale, metrics.sigma_norm_sq) == (None, None)


def test_tcp_info_gives_each_rank_its_own_traffic_of_the_window() -> None:
    rows = (
        examples.row(0, sockets=examples.sockets(5000, 7000, 30), sockets_before=examples.sockets(1000, 2000, 7)),
        examples.row(1, sockets=examples.sockets(10, 20, 0)),
    )
    traffic = read_network(examples.report(rows=rows), NODE)
    assert (traffic.probe, traffic.interval_s) == ("tcp_info", None)
    first = traffic.by_rank[0]
    assert (first.tx_bytes, first.rx_bytes, first.retransmits) == (4000, 5000, 23)
    assert traffic.by_rank[1].tx_bytes == 10


def test_what_the_kernel_counted_comes_first_and_over_the_collectors_own_interval() -> None:
    report = examples.report(rows=(examples.row(0, sockets=examples.sockets(5000, 7000, 30)),))
    counted = NetworkMetrics(tx_bytes=600, rx_bytes=300, retransmits=2)
    traffic = read_network(report, NODE, kernel=Traffic("ebpf", {0: counted}, 1.5))
    assert traffic == Traffic("ebpf", {0: counted}, 1.5, "")
    window = metric_window(report, Observation(node=NODE, network=traffic))
    assert (window.probe, window.ranks[0].network, window.node_metrics.interval_s) == ("ebpf", counted, 1.5)


def test_a_window_names_the_reason_why_no_better_probe_was_used() -> None:
    report = examples.report(rows=(examples.row(0, sockets=examples.sockets(5, 7, 3)),))
    traffic = read_network(report, NODE, kernel="the report came late")
    assert (traffic.probe, traffic.note) == ("tcp_info", "ebpf: the report came late")
    required = read_network(report, NODE, "ebpf", "the report came late")
    assert required == Traffic("none", {}, None, "ebpf: the report came late")
    window = metric_window(report, Observation(node=NODE, network=required))
    assert (window.ranks[0].network, window.probe_note) == (None, required.note)


def test_without_tcp_info_the_namespaces_counters_serve_a_node_of_one_rank_and_no_other() -> None:
    alone = examples.report(rows=(examples.row(0),))
    traffic = read_network(alone, NODE)
    assert (traffic.probe, traffic.by_rank[0].retransmits, traffic.interval_s) == ("proc", 4, 1.0)
    assert read_network(examples.report(), NODE).probe == "none"
    assert read_network(alone, NodeMetrics()).probe == "none"


def test_the_window_keeps_what_the_kernel_saw_and_what_it_did_not() -> None:
    seen = SystemMetrics(cpu_time_ratio=1.5)
    metrics = metric_window(examples.report(), Observation({1: seen}, NODE, num_readings_lost=3, refused_pids=(1000,)))
    assert metrics.ranks[0].system == SystemMetrics()
    assert metrics.ranks[1].system == seen
    assert (metrics.refused_pids, metrics.num_readings_lost) == ((1000,), 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(metrics), type=MetricWindow) == metrics


SYSTEMS = (SystemMetrics(cpu_time_ratio=0.9, memory_ratio=0.25), SystemMetrics(cpu_time_ratio=0.4))


def test_a_virtual_clusters_window_holds_only_the_reports_values() -> None:
    sockets = {"sockets": examples.sockets(3000, 2000), "sockets_before": examples.sockets(1000, 500)}
    rows = tuple(examples.row(rank, pid=1, **sockets) for rank in (0, 1))  # pid 1 runs here, and is not looked at
    window = simulated_window(examples.report(rows=rows, simulated=SYSTEMS))
    assert tuple(rank.system for rank in window.ranks) == SYSTEMS
    assert window.node_metrics == NodeMetrics()
    assert window.refused_pids == ()
    assert window.probe == "tcp_info"
    assert (window.ranks[0].network.tx_bytes, window.ranks[0].network.rx_bytes) == (2000, 1500)
    alone = simulated_window(examples.report(rows=(examples.row(0),), simulated=SYSTEMS[:1]))
    assert (alone.probe, alone.ranks[0].network) == ("none", None)


def test_simulated_metrics_that_do_not_fit_the_rows_are_refused() -> None:
    with pytest.raises(MalformedMessageError, match="1 simulated processes for 2 rows"):
        simulated_window(examples.report(rows=(examples.row(0), examples.row(1)), simulated=SYSTEMS[:1]))


# --- from counters of sockets to the traffic of ranks ---


class Machine:
    """A probe's counters by cookie, what is made of them, and 2 s between two windows."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys((11, 12, 21), Counters(1000, 1000, 5, 400, 4))
        self.left_out, self._now_s = 0, 0.0
        self._traffic = SocketTraffic(cast("SocketProbe", self), lambda: self._now_s)

    def read(self, cookie: int, _uid: int) -> Counters | None:
        return self.counters.get(cookie)

    def num_left_out(self) -> int:
        return self.left_out

    def add(self, cookie: int, *amounts: int) -> None:
        self.counters[cookie] = Counters(*map(sum, zip(self.counters[cookie], amounts, strict=True)))

    def window(self, window: int, *cookies: tuple[int, ...], generation: int = 0) -> Traffic | str:
        """The traffic of a window whose ranks name these sockets, or why it is not known."""
        self._now_s += 2.0
        rows = tuple(examples.row(rank, cookies=named) for rank, named in enumerate(cookies))
        return self._traffic.window(examples.report(window=window, generation=generation, rows=rows))

    def received(self, window: int, *cookies: tuple[int, ...], generation: int = 0) -> int | str | None:
        """The bytes that rank 0 received in the window, or why they are not known."""
        found = self.window(window, *cookies, generation=generation)
        return found if isinstance(found, str) else found.by_rank[0].rx_bytes


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_each_rank_gets_the_sum_of_its_own_sockets_between_two_windows(machine: Machine) -> None:
    assert machine.window(3, (11, 12), (21,)) == "the window before was not read"
    machine.add(11, 70, 30, 20, 1000, 10)
    machine.add(12, 7, 3, 3, 200, 2)
    assert machine.window(4, (11, 12), (21,)) == Traffic(
        "ebpf",
        {
            0: NetworkMetrics(tx_bytes=33, rx_bytes=77, retransmits=23, srtt_us=100.0),
            1: NetworkMetrics(tx_bytes=0, rx_bytes=0, retransmits=0, srtt_us=None),
        },
        2.0,
    )


def test_a_socket_that_the_probe_does_not_know_masks_the_window_for_all_ranks(machine: Machine) -> None:
    del machine.counters[12]
    unknown = "the probe does not know 1 of 2 sockets of rank 0: older than itself, or opened elsewhere"
    assert machine.window(3, (11, 12), (21,)) == unknown
    machine.left_out = 7
    assert machine.window(4, (11, 12), (21,)) == unknown + " (7 found its table full)"
    assert machine.window(3, (), (21,)) == "rank 0 names no socket"


def test_a_socket_whose_counters_fell_masks_one_window_and_is_never_negative(machine: Machine) -> None:
    assert machine.received(0, (11,)) == "nothing was read before a job's first window"
    machine.counters[11] = Counters(0, 3, 0, 0, 0)
    assert machine.received(1, (11,)) == "a socket of rank 0 has smaller counters than before"
    machine.add(11, 9, 0, 0, 0, 0)
    assert machine.received(2, (11,)) == 9


def test_a_window_in_which_sockets_join_is_masked_since_they_carried_something_before(machine: Machine) -> None:
    machine.window(0, (11,))
    assert machine.received(1, (11, 12)) == "rank 0 names other sockets than in the window before"
    machine.add(12, 9, 0, 0, 0, 0)
    assert machine.received(2, (11, 12)) == 9


def test_a_socket_that_closed_keeps_its_last_reading(machine: Machine) -> None:
    machine.window(0, (11, 12))
    machine.add(11, 5, 0, 0, 0, 0)
    del machine.counters[12]
    assert machine.received(1, (11, 12)) == 5


def test_a_window_that_was_not_read_masks_the_next_one_too(machine: Machine) -> None:
    machine.window(0, (11,))
    assert machine.received(2, (11,)) == "the window before was not read"
    assert machine.received(3, (11,)) == 0


def test_an_earlier_generation_is_not_read_and_the_next_starts_without_history(machine: Machine) -> None:
    machine.window(5, (11,))
    assert machine.received(0, (12,), generation=1) == "nothing was read before a job's first window"
    assert machine.received(6, (11,)) == "the window before was not read"
    machine.add(12, 3, 0, 0, 0, 0)
    assert machine.received(1, (12,), generation=1) == 3
    del machine.counters[12]
    assert "does not know" in str(machine.received(0, (12,), generation=2))
