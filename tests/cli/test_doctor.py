"""`dynamix doctor`: each check on what it can meet, the verdict, and the services' health check."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from tests.support.brokers import ConfiguredServer

from dynamix.cli.commands import doctor as checks
from dynamix.cli.commands.doctor import DoctorCheck, credential, is_alive
from dynamix.cli.main import main
from dynamix.collector.ebpf.probe import Counters
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Live

ROOT = Path(__file__).parents[2]
AWAY = BusSettings(url="nats://127.0.0.1:1")


def by_name(checks: list[DoctorCheck]) -> dict[str, DoctorCheck]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("shown", "present"),
    [
        ("nats-server: v2.15.1", True),
        ("nats-server: v2.16.0-RC.1", True),
        ("nats-server: v2.9.25", False),
    ],
)
def test_a_broker_with_known_holes_is_not_good_enough(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, present: bool
) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text(f"#!/bin/sh\necho '{shown}'\n")
    binary.chmod(0o755)
    monkeypatch.setattr(checks, "server_binary", lambda: binary)
    assert checks.server().present is present


def test_a_machine_without_proc_is_fatal(tmp_path: Path) -> None:
    check = checks.kernel(tmp_path)[0]
    assert check.is_fatal
    assert "net/snmp" in check.found


async def test_a_broker_without_streams_lacks_them(server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix.cli.commands.doctor.LISTEN_S", 0.2)
    found = by_name(await checks.bus(server.settings, configured=True))
    assert found["broker"].present
    assert found["streams"].fix == "run `dynamix provision`"
    assert found["services"].found == "not heard: collector, reward, arbitrator"


@contextlib.asynccontextmanager
async def beating(bus: Bus, *services: str, **counters: int) -> AsyncIterator[None]:
    """Heartbeats of made-up services on node-a; tests/deploy hears the real ones."""

    async def beat() -> None:
        while True:
            for name in services:
                live = Live(service=name, instance="node-a", uptime_s=1.0, counters={"ready": 1} | counters)
                await bus.publish_live(live)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(beat())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_streams_services_and_their_complaints_are_found(server: ConfiguredServer, bus: Bus) -> None:
    async with (
        beating(bus, "collector", "reward"),
        beating(bus, "arbitrator", refused_logs=1),
        beating(bus, "trainer", bus_unacknowledged=3, bus_unanswered=1),
    ):
        found = by_name(await checks.bus(server.settings, configured=True))
    assert found["streams"].found == "JOBS 0, REPORTS 0, FEED 0, ACTIONS 0, DEAD 0, PROFILES 0, POLICIES 0"
    assert found["services"].present
    assert "arbitrator" in found["services"].found
    assert "1 generation" in found["actions"].found
    assert "4 messages" in found["storage"].found


async def test_a_service_is_alive_when_this_very_one_beats_and_listens(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.cli.commands.doctor.ALIVE_TIMEOUT_S", 0.5)
    async with beating(bus, "reward"):
        assert await is_alive(server.settings, "reward", {"DYNAMIX_NODE": "node-a"})
        assert not await is_alive(server.settings, "reward", {"DYNAMIX_INSTANCE": "another"})
        assert not await is_alive(server.settings, "collector", {"DYNAMIX_NODE": "node-a"})
    async with beating(bus, "reward", ready=0):
        assert not await is_alive(server.settings, "reward", {"DYNAMIX_NODE": "node-a"})
    assert not await is_alive(AWAY, "reward", {"DYNAMIX_NODE": "node-a"})


def test_the_command_writes_json_and_says_by_its_code_that_nothing_fatal_is_missing() -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DYNAMIX_")}
    command = [sys.executable, "-m", "dynamix.cli.main", "doctor", "--json", "-"]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    written = json.loads(done.stdout)
    (python,) = [check for check in written["findings"] if check["name"] == "Python"]
    assert (python["present"], python["needed_for"], python["fix"], python["fatal"]) == (True, "everything", "", False)
    needs = [check["present"] for check in written["findings"] if check["needed_for"] == "eBPF probes"]
    assert len(needs) == 5


def test_a_broker_that_is_away_is_fatal_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asyncio.run(checks.bus(AWAY, configured=False))[0]
    assert (found.present, found.is_fatal, found.fix) == (False, False, "start one with `dynamix up`")
    monkeypatch.setenv("DYNAMIX_NATS_URL", AWAY.url)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing works without: broker."


def test_a_key_that_others_may_read_is_found_and_closed_by_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "alice.creds"
    file.touch(mode=0o604)
    settings = BusSettings(creds_file=str(file))
    (check,) = credential(settings)
    assert (check.present, check.is_fatal) == (False, False)
    subprocess.run(check.fix.split(), check=True)
    assert credential(settings) == credential(BusSettings()) == credential(BusSettings(creds_file="/none")) == []


# --- eBPF: what is lacking, why the kernel refuses, and a trial in earnest ---

THREE = "000000c000001000"  # CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN
UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
HOSTS = UNIFIED.replace("0:28 /", "0:28 /../..")


def status(capabilities: str) -> str:
    return f"Name:\tpython\nCapEff:\t{capabilities}\n"


class Machine(NamedTuple):
    """A directory that stands in for the root directory."""

    root: Path

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def cgroup_namespace(self, inode: int) -> None:
        (self.root / "proc/self/ns").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/self/ns/cgroup").symlink_to(f"cgroup:[{inode}]")

    def check(self, name: str, release: str = "6.1.0-1-amd64") -> DoctorCheck:
        system = os.uname_result(("Linux", "node", release, "#1", "x86_64"))
        return next(one for one in checks.programs(self.root, system) if one.name == name)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.write("proc/self/status", status(THREE))
    return found


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [
        (THREE, "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN"),
        ("0000000000200000", "CAP_SYS_ADMIN (CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN would do)"),
        ("0000008000000000", "without CAP_PERFMON, CAP_NET_ADMIN"),
    ],
)
def test_capabilities_are_read_bit_by_bit(machine: Machine, capabilities: str, found: str) -> None:
    machine.write("proc/self/status", status(capabilities))
    assert machine.check("rights").found == found


@pytest.mark.parametrize(("release", "present"), [("5.8.0", True), ("10.0-rc1", True), ("5.7.19", False)])
def test_a_kernel_without_the_capabilities_of_ebpf_is_too_old(release: str, machine: Machine, *, present: bool) -> None:
    assert machine.check("kernel", release=release).present is present


@pytest.mark.parametrize(
    ("mountinfo", "inode", "found", "fix"),
    [
        (UNIFIED, 4026531835, "/sys/fs/cgroup", ""),
        (HOSTS, 4026532000, "/sys/fs/cgroup", ""),
        (UNIFIED + HOSTS, 4026532000, "/sys/fs/cgroup", ""),
        (UNIFIED, 4026532000, "this container only", "cgroup: host"),
    ],
    ids=["unified", "host's mount in a container", "host's mount over the container's own", "the container's own"],
)
def test_cgroup_2_is_found_where_all_groups_are_seen(
    machine: Machine, mountinfo: str, inode: int, found: str, fix: str
) -> None:
    machine.write("proc/self/mountinfo", mountinfo)
    machine.cgroup_namespace(inode)
    check = machine.check("cgroup v2")
    assert (found in check.found, fix in check.fix, check.present) == (True, True, not fix)


def test_missing_headers_are_named_with_their_package(machine: Machine) -> None:
    lacks = machine.check("headers")
    assert (lacks.present, "linux-headers-amd64" in lacks.fix) == (False, True)


@pytest.mark.parametrize(("received", "counted"), [(999_999, "999,999 bytes"), (None, "nothing")])
def test_a_trial_that_counts_wrong_is_no_success(
    monkeypatch: pytest.MonkeyPatch, received: int | None, counted: str
) -> None:
    counters = None if received is None else Counters(received, 0, 0, 0, 0)
    probe = SimpleNamespace(read=lambda *_: counters)
    monkeypatch.setattr(checks, "open_probe", lambda _: contextlib.nullcontext(probe))
    check = checks.try_ebpf("")
    assert (check.present, check.found) == (False, f"attached, but counted {counted} of a connection's 1,000,000")
