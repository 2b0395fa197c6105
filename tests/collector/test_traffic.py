"""From counters of sockets to the traffic of ranks, with a kernel that says what it is told to."""

from typing import cast

import pytest
from tests.support import examples

from dynamix.collector.ebpf.probe import Counters, SocketProbe
from dynamix.collector.observation import SocketTraffic
from dynamix.collector.window import Traffic
from dynamix.schemas.messages import NetworkMetrics


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
