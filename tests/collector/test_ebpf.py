"""The eBPF probe in the running kernel: what it counts, what it needs, and that it leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.sockets import connected, cookie, read, send, tcp_info

from dynamix.collector.ebpf import syscall
from dynamix.collector.ebpf.attachment import KINDS, opened, v2_mount
from dynamix.collector.ebpf.probe import SocketProbe, open_probe
from dynamix.collector.ebpf.syscall import ProbeError
from dynamix.collector.shown import STATS_ENABLED, ShownWindows
from dynamix.runtime.metrics import ServiceMetrics

pytestmark = pytest.mark.bpf

MIB = 1 << 20
HOLD = "from pathlib import Path; from dynamix.collector.ebpf.probe import SocketProbe; "
HOLD += "probe = SocketProbe(Path({directory!r}), links={links}); print('attached', flush=True); input()"
THREE = "-all,+bpf,+net_admin,+perfmon"


def mount() -> Path:
    found = v2_mount(Path("/proc/self/mountinfo").read_text())
    assert found is not None
    return found


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
        return [identity for kind in KINDS for identity in syscall.attached(descriptor, kind)]


@contextmanager
def holder(directory: Path, *, links: bool) -> Iterator[subprocess.Popen[str]]:
    """Another process with a probe of its own on a control group."""
    program = HOLD.format(directory=str(directory), links=links)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        try:
            yield process
        finally:
            process.kill()


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


def test_sockets_that_share_a_process_are_kept_apart(probe: SocketProbe) -> None:
    with ExitStack() as stack:
        pairs = [stack.enter_context(connected()) for _ in range(3)]
        for number, (client, server) in enumerate(pairs, start=1):
            send(client, server, number * 1000)
        assert [read(probe, server).received_bytes for _, server in pairs] == [1000, 2000, 3000]


def test_a_socket_older_than_the_probe_is_not_known_to_it() -> None:
    with connected() as (client, server), SocketProbe(mount()) as late:
        send(client, server, 1000)
        assert late.read(cookie(server), os.getuid()) is None
        with connected() as (younger, other):
            send(younger, other, 1000)
            assert read(late, other).received_bytes == 1000


def test_a_socket_of_another_control_group_is_not_known(group: Path) -> None:
    with SocketProbe(group) as elsewhere, connected() as (client, server):
        send(client, server, 1000)
        assert elsewhere.read(cookie(server), os.getuid()) is None


def test_a_socket_is_not_readable_under_another_user(probe: SocketProbe) -> None:
    with connected() as (client, server):
        send(client, server, 1000)
        assert probe.read(cookie(server), os.getuid() + 1) is None


def test_a_recently_closed_socket_is_still_known(probe: SocketProbe) -> None:
    with connected() as (client, server):
        number = cookie(server)
        send(client, server, 1000)
        client.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""
    counters = probe.read(number, os.getuid())
    assert counters is not None
    assert counters.received_bytes - 1 == 1000  # the end of the stream has a place in it


def test_the_kernel_says_what_each_program_cost(probe: SocketProbe) -> None:
    assert set(probe.cost()) == {"dynamix_ingress", "dynamix_sockets"}


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
    with holder(group, links=True) as process:
        assert len(attached_to(group)) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert attached_to(group) == []


def test_what_was_attached_in_the_older_way_is_removed_at_the_next_start(group: Path) -> None:
    with holder(group, links=False) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(attached_to(group)) == 2
    with SocketProbe(group) as probe:
        assert probe.num_stale_removed == 2
        assert len(attached_to(group)) == 2
    assert attached_to(group) == []


def test_the_programs_of_a_living_collector_are_not_removed(group: Path) -> None:
    with holder(group, links=False) as process, SocketProbe(group) as probe:
        assert probe.num_stale_removed == 0
        assert len(attached_to(group)) == 4
        assert process.poll() is None
        process.communicate("\n")
        assert len(attached_to(group)) == 4, (
            "the older way leaves the programs of a process that ends without detaching"
        )
    with SocketProbe(group) as probe:
        assert probe.num_stale_removed == 2


def run_with(capabilities: str, program: str) -> subprocess.CompletedProcess[str]:
    """In a process that has these capabilities and no other: what is outside of the bounding set not even root gets."""
    command = ["setpriv", "--inh-caps", capabilities, "--bounding-set", capabilities, sys.executable, "-c"]
    return subprocess.run([*command, program], capture_output=True, text=True, timeout=60, check=False)


def test_three_capabilities_are_enough_and_fewer_are_not() -> None:
    program = (
        "from dynamix.collector.ebpf.probe import open_probe\n"
        "with open_probe() as probe: print(probe.num_left_out() == 0)"
    )
    enough = run_with(THREE, program)
    assert (enough.returncode, enough.stdout) == (0, "True\n"), enough.stderr
    refused = run_with("-all", program)
    assert "it lacks one of CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN" in refused.stderr


def test_a_path_that_is_no_control_group_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="is no control group of version 2: DYNAMIX_COLLECTOR_CGROUP"):
        open_probe(str(tmp_path))
