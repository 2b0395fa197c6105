"""From counters of sockets to the traffic of ranks, with a kernel that says what it is told to."""

from typing import cast

import pytest
from tests.collector.test_procfs import Clock
from tests.support import examples

from dynamix.collector.ebpf.probe import Counters, SocketProbe
from dynamix.collector.observation import SocketTraffic
from dynamix.collector.window import Traffic
from dynamix.schemas.messages import NetworkMetrics, Report


class Kernel:
    """A probe's counters by cookie."""

    def __init__(self) -> None:
        self.counters: dict[int, Counters] = {}
        self.left_out = 0

    def read(self, cookie: int, _uid: int) -> Counters | None:
        return self.counters.get(cookie)

    def num_left_out(self) -> int:
        return self.left_out

    def add(self, cookie: int, *amounts: int) -> None:
        before = self.counters.get(cookie, Counters(0, 0, 0, 0, 0))
        self.counters[cookie] = Counters(*(was + more for was, more in zip(before, amounts, strict=True)))


def report_of(window: int, *cookies: tuple[int, ...], generation: int = 0, job: str = examples.JOB) -> Report:
    rows = tuple(examples.row(rank, cookies=named) for rank, named in enumerate(cookies))
    return examples.report(window=window, generation=generation, job=job, rows=rows, totals=examples.totals(window))


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    for cookie in (11, 12, 21):
        kernel.add(cookie, 1000, 1000, 5, 400, 4)
    return kernel


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sockets(kernel: Kernel, clock: Clock) -> SocketTraffic:
    return SocketTraffic(cast("SocketProbe", kernel), clock)


def test_each_rank_gets_the_sum_of_its_own_sockets_between_two_windows(
    kernel: Kernel, clock: Clock, sockets: SocketTraffic
) -> None:
    assert sockets.window(report_of(3, (11, 12), (21,))) == "the window before was not read"
    kernel.add(11, 70, 30, 20, 1000, 10)
    kernel.add(12, 7, 3, 3, 200, 2)
    clock.now_s += 2.0
    window = sockets.window(report_of(4, (11, 12), (21,)))
    assert window == Traffic(
        "ebpf",
        {
            0: NetworkMetrics(tx_bytes=33, rx_bytes=77, retransmits=23, srtt_us=100.0),
            1: NetworkMetrics(tx_bytes=0, rx_bytes=0, retransmits=0, srtt_us=None),
        },
        2.0,
    )


def test_a_socket_that_the_probe_does_not_know_masks_the_window_for_all_ranks(
    kernel: Kernel, sockets: SocketTraffic
) -> None:
    del kernel.counters[12]
    unknown = "the probe does not know 1 of 2 sockets of rank 0: older than itself, or opened elsewhere"
    assert sockets.window(report_of(3, (11, 12), (21,))) == unknown
    kernel.left_out = 7
    assert sockets.window(report_of(4, (11, 12), (21,))) == unknown + " (7 found its table full)"
    assert sockets.window(report_of(3, (), (21,))) == "rank 0 names no socket"


def test_a_socket_whose_counters_fell_masks_one_window_and_is_never_negative(
    kernel: Kernel, clock: Clock, sockets: SocketTraffic
) -> None:
    said = []
    for window in range(3):
        if window == 1:
            kernel.counters[11] = Counters(0, 3, 0, 0, 0)
        clock.now_s += 1.0
        kernel.add(11, 9, 0, 0, 0, 0)
        found = sockets.window(report_of(window, (11,)))
        said.append(found.by_rank[0].rx_bytes if isinstance(found, Traffic) else found)
    assert said == [
        "nothing was read before a job's first window",
        "a socket of rank 0 has smaller counters than before",
        9,
    ]


def test_a_window_in_which_sockets_join_is_masked_since_they_carried_something_before(
    kernel: Kernel, clock: Clock, sockets: SocketTraffic
) -> None:
    sockets.window(report_of(0, (11,)))
    clock.now_s += 1.0
    assert sockets.window(report_of(1, (11, 12))) == "rank 0 names other sockets than in the window before"
    kernel.add(12, 9, 0, 0, 0, 0)
    clock.now_s += 1.0
    window = sockets.window(report_of(2, (11, 12)))
    assert isinstance(window, Traffic)
    assert window.by_rank[0].rx_bytes == 9


def test_a_socket_that_closed_keeps_its_last_reading(kernel: Kernel, clock: Clock, sockets: SocketTraffic) -> None:
    sockets.window(report_of(0, (11, 12)))
    kernel.add(11, 5, 0, 0, 0, 0)
    del kernel.counters[12]
    clock.now_s += 1.0
    window = sockets.window(report_of(1, (11, 12)))
    assert isinstance(window, Traffic)
    assert window.by_rank[0].rx_bytes == 5


def test_a_window_that_was_not_read_masks_the_next_one_too(clock: Clock, sockets: SocketTraffic) -> None:
    sockets.window(report_of(0, (11,)))
    clock.now_s += 2.0
    assert sockets.window(report_of(2, (11,))) == "the window before was not read"
    clock.now_s += 1.0
    assert isinstance(sockets.window(report_of(3, (11,))), Traffic)


def test_an_earlier_generation_is_not_read_and_the_next_starts_without_history(
    kernel: Kernel, clock: Clock, sockets: SocketTraffic
) -> None:
    sockets.window(report_of(5, (11,)))
    clock.now_s += 1.0
    assert sockets.window(report_of(0, (12,), generation=1)) == "nothing was read before a job's first window"
    assert sockets.window(report_of(6, (11,), generation=0)) == "the window before was not read"
    kernel.add(12, 3, 0, 0, 0, 0)
    clock.now_s += 1.0
    window = sockets.window(report_of(1, (12,), generation=1))
    assert isinstance(window, Traffic)
    assert window.by_rank[0].rx_bytes == 3
    del kernel.counters[12]
    assert "does not know" in str(sockets.window(report_of(0, (12,), generation=2)))
