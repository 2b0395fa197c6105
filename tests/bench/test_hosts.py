"""Hosts on one machine: what they can do to a network and a processor, and that nothing of them is ever left."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.hosts import Host, Hosts, HostsError, Link
from bench.hosts.cgroups import PERIOD_US, Cgroup, Hierarchies, find_hierarchies, v1_cpu_mount
from bench.hosts.namespace import DIRECTORY
from bench.hosts.removal import Name, remove_stale_programs
from tests.support.benches import ROOT
from tests.support.brokers import until

from dynamix.collector.procfs.proc import Proc

HYBRID = """\
36 29 0:31 / /sys/fs/cgroup/cpuset rw,relatime shared:9 - cgroup cgroup rw,cpuset
37 29 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:10 - cgroup cgroup rw,cpu,cpuacct
38 29 0:33 / /sys/fs/cgroup/unified rw,relatime shared:11 - cgroup2 cgroup2 rw
"""

OWNER = """
import sys
from bench.hosts import Hosts, Link

with Hosts(2, cores=0.5) as hosts:
    hosts[1].set_link(Link.parse("20mbit"))
    child = hosts[1].popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=-1)
    print(*hosts.name, child.pid, child.stdout.readline().decode().strip(), hosts._janitor.pid, flush=True)
    sys.stdin.read()
"""

BURN = """
import time

began_s, used_s = time.monotonic(), time.process_time()
while time.process_time() - used_s < 0.05:
    pass
print((time.process_time() - used_s) / (time.monotonic() - began_s))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


@pytest.fixture
def pair(hosts: Hosts) -> Iterator[tuple[Host, Host]]:
    yield hosts[0], hosts[1]
    for host in hosts:
        host.set_link(None)
        host.set_cores(None)


@contextlib.contextmanager
def connection(sender: Host, receiver: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket belongs for ever to the network in which it was made."""
    with receiver.namespace.entered():
        server = socket.create_server((receiver.address, 0))
    with server, sender.namespace.entered():
        client = socket.create_connection((receiver.address, server.getsockname()[1]))
        accepted, _ = server.accept()
    with client, accepted:
        yield client, accepted


def send(
    sender: Host, receiver: Host, num_bytes: int, on_first: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """Seconds until all has arrived, and how many segments the socket says it retransmitted."""
    with connection(sender, receiver) as (client, accepted):
        thread = threading.Thread(target=client.sendall, args=(bytes(num_bytes),))
        began_s = time.monotonic()
        thread.start()
        left = num_bytes - len(accepted.recv(1))
        on_first()
        while left:
            left -= len(accepted.recv(left))
        took_s = time.monotonic() - began_s
        thread.join()
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        return took_s, struct.unpack_from("=I", info, 100)[0]


def left_of(name: Name) -> list[Path]:
    """Namespaces and cgroups of that name."""
    places = [path for path in (DIRECTORY, *find_hierarchies().roots) if path.exists()]
    return [path for place in places for path in place.iterdir() if path.name.startswith(str(name))]


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def start_owner() -> tuple[subprocess.Popen[bytes], Name, list[int], int]:
    """A process with hosts and with processes there; its name, their pids, the janitor's."""
    elsewhere = {"cwd": "/", "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **elsewhere)
    assert owner.stdout is not None
    *name, child, grandchild, janitor = map(int, owner.stdout.readline().split())
    return owner, Name(*name), [child, grandchild], janitor


@pytest.mark.bpf
def test_hosts_reach_each_other_and_the_switch_and_nothing_else(hosts: Hosts, pair: tuple[Host, Host]) -> None:
    assert len(hosts) == 2
    assert pair[0].address != pair[1].address
    send(*pair, 10_000)
    with hosts.entered():
        server = socket.create_server((hosts.address, 0))
    with server, pair[0].namespace.entered():
        socket.create_connection(server.getsockname()).close()
    with (
        socket.create_server(("127.0.0.1", 0)) as ours,
        pair[0].namespace.entered(),
        pytest.raises(OSError, match="re"),
    ):
        socket.create_connection(ours.getsockname())


@pytest.mark.bpf
def test_a_thread_that_was_on_a_host_comes_back(pair: tuple[Host, Host]) -> None:
    before = Path("/proc/thread-self/ns/net").readlink()
    with pair[0].namespace.entered():
        assert Path("/proc/thread-self/ns/net").readlink() != before
    assert Path("/proc/thread-self/ns/net").readlink() == before


@pytest.mark.bpf
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_link_carries_no_more_than_its_rate_in_both_directions(pair: tuple[Host, Host], slow: int) -> None:
    link = Link.parse("20mbit")
    pair[slow].set_link(link)
    took_s, _ = send(*pair, 500_000)
    assert took_s >= (500_000 - link.burst_bytes) * 8 / link.rate


@pytest.mark.bpf
def test_a_link_can_change_while_it_carries(pair: tuple[Host, Host]) -> None:
    slow = Link.parse("1mbit")
    pair[1].set_link(slow)
    began_s = time.monotonic()
    took_s, _ = send(*pair, 4_000_000, on_first=lambda: pair[1].set_link(Link.parse("1gbit")))
    assert took_s < time.monotonic() - began_s < 4_000_000 * 8 / slow.rate / 2


@pytest.mark.bpf
def test_a_short_queue_makes_tcp_retransmit_and_segments_are_counted(pair: tuple[Host, Host]) -> None:
    pair[1].set_link(Link.parse("50mbit", queue_limit_bytes=10_000))
    before = pair[0].namespace.traffic()
    _, retransmits = send(*pair, 1_000_000)
    after = pair[0].namespace.traffic()
    assert retransmits > 0
    assert after.retransmits - before.retransmits == retransmits
    assert after.tx_bytes - before.tx_bytes > 1_000_000


@pytest.mark.bpf
def test_a_share_of_the_processor_holds_for_all_of_a_host(pair: tuple[Host, Host]) -> None:
    pair[0].set_cores(0.1)
    child = pair[0].popen([sys.executable, "-I", "-S", "-c", BURN], stdout=subprocess.PIPE)
    said, _ = child.communicate()
    assert child.returncode == 0
    assert 0 < float(said) <= 0.1 + 2 * PERIOD_US / 1e6


@pytest.mark.bpf
def test_a_process_is_in_the_hosts_network_and_cgroup_under_the_pid_it_was_started_with(
    pair: tuple[Host, Host],
) -> None:
    look = "readlink /proc/self/ns/net; cat /proc/self/cgroup; echo $$; echo $NAME"
    child = pair[1].popen(["sh", "-c", look], env={**os.environ, "NAME": "value"}, stdout=subprocess.PIPE)
    said, _ = child.communicate()
    network, *cgroups, pid, value = said.decode().splitlines()
    assert network == f"net:[{pair[1].namespace.path.stat().st_ino}]"
    assert f"0::/{pair[1].cgroup.relative_to(find_hierarchies().unified)}" in cgroups
    assert (int(pid), value) == (child.pid, "value")


@pytest.mark.bpf
def test_nothing_is_left_after_the_end() -> None:
    with Hosts(1) as hosts:
        child = hosts[0].popen(["sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout as said:
            grandchild = int(said.readline())
        assert len(left_of(hosts.name)) >= 3
    assert left_of(hosts.name) == []
    assert child.returncode == -signal.SIGKILL
    assert not is_running(grandchild)


@pytest.mark.bpf
def test_nothing_is_left_when_it_fails_half_way() -> None:
    hosts = Hosts(2, cores=0.001)
    with pytest.raises(HostsError, match="less than"):
        hosts.__enter__()
    assert left_of(hosts.name) == []


@pytest.mark.bpf
def test_two_sets_of_hosts_do_not_disturb_each_other(hosts: Hosts, pair: tuple[Host, Host]) -> None:
    with Hosts(2) as others:
        assert others.name != hosts.name
        send(others[0], others[1], 1000)
    send(*pair, 1000)


@pytest.mark.bpf
async def test_nothing_is_left_after_the_owner_was_killed() -> None:
    owner, name, pids, janitor = start_owner()
    assert all(map(is_running, [*pids, janitor]))
    assert len(left_of(name)) >= 4
    owner.kill()
    owner.communicate()
    await until(lambda: not any(map(is_running, [*pids, janitor])))
    assert left_of(name) == []


@pytest.mark.bpf
async def test_the_janitor_outlives_what_ends_its_owner() -> None:
    owner, name, pids, janitor = start_owner()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(janitor, number)
    owner.send_signal(signal.SIGTERM)
    owner.communicate()
    await until(lambda: not is_running(janitor))
    assert left_of(name) == []
    assert not any(map(is_running, pids))


@pytest.mark.bpf
async def test_what_an_owner_and_its_janitor_left_the_next_one_removes() -> None:
    owner, name, pids, janitor = start_owner()
    os.kill(janitor, signal.SIGKILL)
    owner.kill()
    owner.communicate()
    assert not name.has_living_owner()
    remove_stale_programs()
    assert left_of(name) == []
    await until(lambda: not any(map(is_running, pids)))


@pytest.mark.bpf
def test_hosts_remove_themselves_when_their_janitor_was_killed() -> None:
    with Hosts(1) as hosts:
        assert hosts._janitor is not None
        hosts._janitor.kill()
        assert left_of(hosts.name) != []
    assert left_of(hosts.name) == []


@pytest.mark.parametrize(
    ("text", "rate"), [("20mbit", 20e6), ("1.5gbit", 1.5e9), ("800kbit", 8e5), ("9000bit", 9e3), (" 20Mbit ", 20e6)]
)
def test_a_rate_is_written_as_tc_writes_it(text: str, rate: float) -> None:
    assert Link.parse(text).rate == rate


@pytest.mark.parametrize("text", ["20", "20mbps", "-1mbit", "fast", "1bit"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(HostsError, match=r"rate|below"):
        Link.parse(text)


def test_a_link_becomes_tbf_with_a_burst_of_a_millisecond() -> None:
    assert " ".join(Link(rate=1e9, queue_limit_bytes=10_000).tbf) == "rate 1000000000bit burst 125000 limit 10000"
    assert Link(rate=2e7).burst_bytes == 4096
    with pytest.raises(HostsError, match="at least 4096"):
        Link(rate=2e7, queue_limit_bytes=1500)


def test_a_share_below_what_the_kernel_knows_is_refused(tmp_path: Path) -> None:
    cgroup = Cgroup(Hierarchies(tmp_path, None), str(Name.make()), 0)
    with pytest.raises(HostsError, match=r"less than 0\.05"):
        cgroup.set_cores(0.01)
    with pytest.raises(HostsError, match="no cgroup hierarchy"):
        cgroup.set_cores(0.5)


def test_the_processors_controller_of_version_1_is_found_by_name() -> None:
    assert v1_cpu_mount(HYBRID) == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert v1_cpu_mount(HYBRID.replace(",cpu,", ",rdma,")) is None


def test_a_version_2_with_the_controller_is_used_for_both(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate\n")
    assert find_hierarchies(mounts).roots == (tmp_path,)
    mounts.write_text(HYBRID.splitlines()[0])
    with pytest.raises(HostsError, match="mount -t cgroup2"):
        find_hierarchies(mounts)


def test_with_version_2_alone_the_share_is_in_the_same_cgroup(tmp_path: Path) -> None:
    name = str(Name.make())
    cgroup = Cgroup(Hierarchies(tmp_path, tmp_path), name, 1)
    cgroup.create()
    assert cgroup.procs == (tmp_path / name / "1" / "cgroup.procs",)
    for directory in (tmp_path, tmp_path / name):
        assert (directory / "cgroup.subtree_control").read_text() == "+cpu"
    cgroup.set_cores(0.4)
    assert (cgroup.unified / "cpu.max").read_text() == f"8000 {PERIOD_US}"
    cgroup.set_cores(None)
    assert (cgroup.unified / "cpu.max").read_text() == f"max {PERIOD_US}"


def test_a_zombie_owner_is_dead() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        name = Name(process.pid, Proc().stat(process.pid).start_ticks, 0)
        assert name.has_living_owner()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not name.has_living_owner()
        assert Proc().stat(process.pid).start_ticks == name.start_ticks  # a zombie


def test_a_name_identifies_its_owner() -> None:
    name = Name.make()
    assert Name.parse(f"{name}.switch") == name
    assert Name.parse("another-name") is None
    assert name.has_living_owner()
    assert not name._replace(start_ticks=name.start_ticks + 1).has_living_owner()
    assert not name._replace(pid=2**22 + 1).has_living_owner()
    assert name.pid == os.getpid()
    assert Proc().stat(name.pid).start_ticks == name.start_ticks


def test_hosts_that_cannot_be_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostsError, match="1 to 1023"):
        Hosts(0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsError, match="must be root, not uid 1000"), Hosts(1):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostsError, match="apt-get install iproute2"), Hosts(1):
        pass
