"""From counters of sockets to the traffic of ranks, with a kernel that says what it is told to."""

import pytest
from tests.support import made

from dynamix.collector.ebpf.program import Counters
from dynamix.collector.ebpf.traffic import KernelWindow, SocketTraffic
from dynamix.collector.intervals import FORGET_AFTER_S
from dynamix.schemas.messages import NetworkMetrics, Report


class Kernel:
    """Counters by cookie, and which sockets are claimed."""

    def __init__(self) -> None:
        self.counters: dict[int, Counters] = {}
        self.claimed: set[int] = set()
        self.uids: dict[int, int] = {}

    def claim(self, cookie: int) -> None:
        self.claimed.add(cookie)

    def release(self, cookie: int) -> None:
        self.claimed.remove(cookie)

    def read(self, cookie: int, uid: int) -> Counters | None:
        return self.counters.get(cookie) if self.uids.get(cookie, uid) == uid else None

    def add(self, cookie: int, *amounts: int) -> None:
        before = self.counters.get(cookie, Counters(0, 0, 0, 0, 0))
        self.counters[cookie] = Counters(*(was + more for was, more in zip(before, amounts, strict=True)))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def report_of(window: int, *cookies: tuple[int, ...], generation: int = 0, job: str = made.JOB) -> Report:
    rows = tuple(made.row(rank, cookies=named) for rank, named in enumerate(cookies))
    return made.report(window=window, generation=generation, job=job, rows=rows, totals=made.totals(window))


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
    return SocketTraffic(kernel, clock)


def test_each_rank_gets_the_sum_of_its_own_sockets_between_two_windows(
    kernel: Kernel, clock: Clock, sockets: SocketTraffic
) -> None:
    assert sockets.window(report_of(3, (11, 12), (21,))) == "the window before was not read"
    kernel.add(11, 70, 30, 20, 1000, 10)
    kernel.add(12, 7, 3, 3, 200, 2)
    clock.now_s += 2.0
    window = sockets.window(report_of(4, (11, 12), (21,)))
    assert window == KernelWindow(
        {
            0: NetworkMetrics(tx_bytes=33, rx_bytes=77, retransmits=23, srtt_us=100.0),
            1: NetworkMetrics(tx_bytes=0, rx_bytes=0, retransmits=0, srtt_us=None),
        },
        2.0,
    )


def test_a_socket_older_than_the_probe_masks_the_window_for_all_ranks(kernel: Kernel, sockets: SocketTraffic) -> None:
    del kernel.counters[12]
    reason = sockets.window(report_of(3, (11, 12), (21,)))
    assert reason == "1 of 2 sockets of rank 0 are older than the probe"
    assert sockets.window(report_of(3, (), (21,))) == "rank 0 names no socket"


def test_a_socket_of_another_user_is_not_read(kernel: Kernel, sockets: SocketTraffic) -> None:
    kernel.uids[11] = 4321
    assert "older than the probe" in str(sockets.window(report_of(3, (11,))))


def test_a_socket_that_joins_later_counts_from_its_beginning(clock: Clock, sockets: SocketTraffic) -> None:
    sockets.window(report_of(0, (11,)))
    clock.now_s += 1.0
    window = sockets.window(report_of(1, (11, 12)))
    assert isinstance(window, KernelWindow)
    assert (window.by_rank[0].rx_bytes, window.by_rank[0].retransmits) == (1000, 5)


def test_bytes_counted_a_moment_early_are_not_counted_twice(
    kernel: Kernel, clock: Clock, sockets: SocketTraffic
) -> None:
    received = []
    for window, received_bytes in enumerate((1000, 1500, 1400, 1700)):
        kernel.counters[11] = Counters(received_bytes, 0, 0, 0, 0)
        clock.now_s += 1.0
        found = sockets.window(report_of(window, (11,)))
        received.append(found.by_rank[0].rx_bytes if isinstance(found, KernelWindow) else None)
    assert received == [None, 500, 0, 200]


def test_a_window_that_was_not_read_masks_the_next_one_too(clock: Clock, sockets: SocketTraffic) -> None:
    sockets.window(report_of(0, (11,)))
    clock.now_s += 2.0
    assert sockets.window(report_of(2, (11,))) == "the window before was not read"
    clock.now_s += 1.0
    assert isinstance(sockets.window(report_of(3, (11,))), KernelWindow)


def test_sockets_are_claimed_while_their_job_names_them(kernel: Kernel, clock: Clock, sockets: SocketTraffic) -> None:
    sockets.window(report_of(0, (11, 12), (21,)))
    sockets.window(report_of(0, (31,), job="other-0a1b2c3d"))
    assert kernel.claimed == {11, 12, 21, 31}
    kernel.add(41, 0, 0, 0, 0, 0)
    sockets.window(report_of(0, (41,), generation=1))
    assert kernel.claimed == {41, 31}
    assert sockets.window(report_of(9, (11,), generation=0)) == "the job has started again since"
    assert kernel.claimed == {41, 31}
    clock.now_s += FORGET_AFTER_S + 1
    sockets.window(report_of(1, (51,), job="third-0a1b2c3d"))
    assert kernel.claimed == {51}
