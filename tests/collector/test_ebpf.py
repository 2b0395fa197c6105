"""The eBPF probe in the running kernel: what it counts, what it needs, and that it leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.hosts import Hosts, Link
from tests.support.sockets import connected, connected_over, cookie, read, send, tcp_info

from dynamix.collector.ebpf import syscall
from dynamix.collector.ebpf.probe import PROGRAMS, SocketProbe, open_probe, opened, v2_mount
from dynamix.collector.ebpf.syscall import ProbeError
from dynamix.collector.shown import STATS_ENABLED, ShownWindows
from dynamix.runtime.metrics import ServiceMetrics

pytestmark = pytest.mark.bpf

MIB = 1 << 20
HOLD = "from pathlib import Path; from dynamix.collector.ebpf.probe import SocketProbe; "
HOLD += "probe = SocketProbe(Path({directory!r})); print('attached', flush=True); input()"


def mount() -> Path:
    return v2_mount(Path("/proc/self/mountinfo").read_text())


@pytest.fixture(scope="module")
def probe() -> Iterator[SocketProbe]:
    with open_probe() as opened_probe:
        yield opened_probe


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of the test's own."""
    directory = mount() / f"dynamix-test-{os.getpid()}"
    directory.mkdir()
    yield directory
    directory.rmdir()


def attached_to(directory: Path) -> list[int]:
    with opened(directory) as descriptor:
        return [identity for kind in PROGRAMS.values() for identity in syscall.attached(descriptor, kind)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_payload_is_counted_to_the_byte_as_tcp_info_counts_it(probe: SocketProbe, address: str) -> None:
    with connected(address) as (client, server):
        send(client, server, 20 * MIB + 7)
        send(server, client, MIB + 3)
        for end, received_bytes in ((client, MIB + 3), (server, 20 * MIB + 7)):
            counters = read(probe, end)
            assert counters.received_bytes == received_bytes
            assert counters[:3] == tcp_info(end)
        sent = read(probe, client)
        assert sent.num_rtts > 0
        assert 0 < sent.srtt_sum_us / sent.num_rtts < 1_000_000


def test_a_socket_that_is_older_elsewhere_or_another_users_is_not_known(probe: SocketProbe, group: Path) -> None:
    with connected() as (client, server), SocketProbe(mount()) as late, SocketProbe(group) as elsewhere:
        send(client, server, 1000)
        assert late.read(cookie(server), os.getuid()) is None
        assert probe.read(cookie(server), os.getuid() + 1) is None
        with connected() as (younger, other):
            send(younger, other, 1000)
            assert read(late, other).received_bytes == 1000
            assert elsewhere.read(cookie(other), os.getuid()) is None


def test_a_recently_closed_socket_is_still_known(probe: SocketProbe) -> None:
    with connected() as (client, server):
        number = cookie(server)
        send(client, server, 1000)
        client.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""
    counters = probe.read(number, os.getuid())
    assert counters.received_bytes - 1 == 1000  # the end of the stream has a place in it


def test_what_the_probe_costs_is_shown_while_the_kernel_counts_it(probe: SocketProbe) -> None:
    metrics = ServiceMetrics("collector")
    ShownWindows(metrics, probe)

    def shown(name: str) -> float:
        (line,) = [line for line in metrics.exposition("")[0].decode().splitlines() if line.startswith(f"{name}{{")]
        return float(line.split()[-1])

    before = STATS_ENABLED.read_text()
    STATS_ENABLED.write_text("1")
    try:
        assert shown("dynamix_probe_cost_measured") == 1
        runs, seconds = shown("dynamix_probe_runs_total"), shown("dynamix_probe_cost_seconds_total")
        with connected() as (client, server):
            send(client, server, MIB)
        assert shown("dynamix_probe_runs_total") > runs
        assert seconds < shown("dynamix_probe_cost_seconds_total") < seconds + 1
    finally:
        STATS_ENABLED.write_text(before)


def test_nothing_stays_attached_after_kill_9(group: Path) -> None:
    command = [sys.executable, "-c", HOLD.format(directory=str(group))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "attached\n"
        assert len(attached_to(group)) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert attached_to(group) == []


def test_without_capabilities_it_says_which_it_needs() -> None:
    program = "from dynamix.collector.ebpf.probe import open_probe\nwith open_probe(): pass"
    command = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", sys.executable, "-c", program]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "it lacks one of CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN" in refused.stderr


def test_a_path_that_is_no_control_group_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="is no control group of version 2: DYNAMIX_COLLECTOR_CGROUP"):
        open_probe(str(tmp_path))


def test_retransmitted_segments_equal_the_kernels_statistics_on_each_host(probe: SocketProbe) -> None:
    """Three hosts in a ring; the link of one loses packets. The sockets are this process's."""
    with Hosts(3) as hosts, ExitStack() as stack:
        places = [host.namespace.entered for host in hosts]
        ring = [
            stack.enter_context(connected_over(places[rank], places[rank - 2], (hosts[rank - 2].address, 0)))
            for rank in range(3)
        ]
        hosts[1].set_link(Link(rate=100e6, queue_limit_bytes=10_000))
        before = [host.namespace.traffic().retransmits for host in hosts]
        threads = [threading.Thread(target=send, args=(client, server, MIB // 4)) for client, server in ring]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counted = [
            read(probe, ring[rank][0]).retransmits + read(probe, ring[rank - 1][1]).retransmits for rank in range(3)
        ]
        after = [host.namespace.traffic().retransmits for host in hosts]
        assert counted == [last - first for last, first in zip(after, before, strict=True)]
        assert min(counted[:2]) > 10, "the link must have lost something"
        assert [read(probe, server).received_bytes for _, server in ring] == [MIB // 4] * 3
        assert read(probe, ring[1][0]).acked_bytes - 1 == MIB // 4  # the start of the stream has a place in it
