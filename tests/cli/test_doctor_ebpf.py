"""What `dynamix doctor` says of eBPF: what is lacking, why the kernel refuses, and a trial in earnest."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from dynamix.cli.commands import doctor as checks
from dynamix.cli.commands.doctor import DoctorCheck
from dynamix.collector.ebpf.probe import Counters
from dynamix.collector.window import WantedProbe

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

    def check(self, name: str, load: Callable[[], None] | None = None, release: str = "6.1.0-1-amd64") -> DoctorCheck:
        system = os.uname_result(("Linux", "node", release, "#1", "x86_64"))
        return next(one for one in checks.programs(self.root, system, load or (lambda: None)) if one.name == name)


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


def test_a_refusal_of_the_kernel_is_reported(machine: Machine) -> None:
    def load() -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    check = machine.check("bpf()", load)
    assert (check.present, check.found) == (False, "refused: Operation not permitted")


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


ALL = [DoctorCheck("headers", "eBPF probes", "")]
NO_HEADERS = [DoctorCheck("headers", "eBPF probes", "", "fix"), DoctorCheck("bcc", "eBPF probes", "", "fix")]
TCP, NO_TCP = [DoctorCheck("TCP_INFO", "training", "")], [DoctorCheck("TCP_INFO", "training", "", "fix")]


@pytest.mark.parametrize(
    ("wanted", "kernel", "programs", "present", "found"),
    [
        ("auto", TCP, ALL, True, "`auto` takes ebpf: `dynamix doctor --ebpf` tries it"),
        ("auto", TCP, NO_HEADERS, True, "`auto` takes tcp_info: eBPF lacks headers, bcc"),
        ("auto", NO_TCP, NO_HEADERS, True, "`auto` takes proc: eBPF lacks headers, bcc"),
        ("proc", TCP, ALL, True, "proc, as DYNAMIX_COLLECTOR_PROBE says"),
        ("ebpf", TCP, ALL, True, "ebpf, as DYNAMIX_COLLECTOR_PROBE says"),
        ("ebpf", TCP, NO_HEADERS, False, "the collector refuses to start: eBPF is wanted and lacks headers, bcc"),
    ],
)
def test_it_says_which_probe_the_collector_takes_and_why(
    wanted: WantedProbe, kernel: list[DoctorCheck], programs: list[DoctorCheck], *, present: bool, found: str
) -> None:
    _, check = checks.chosen(kernel, programs, wanted)
    assert (check.present, check.found) == (present, found)


@pytest.mark.parametrize(("received", "counted"), [(999_999, "999,999 bytes"), (None, "nothing")])
def test_a_trial_that_counts_wrong_is_no_success(
    monkeypatch: pytest.MonkeyPatch, received: int | None, counted: str
) -> None:
    counters = None if received is None else Counters(received, 0, 0, 0, 0)
    probe = SimpleNamespace(read=lambda *_: counters)
    monkeypatch.setattr(checks, "open_probe", lambda _: contextlib.nullcontext(probe))
    check = checks.try_ebpf("")
    assert (check.present, check.found) == (False, f"attached, but counted {counted} of a connection's 1,000,000")


@pytest.mark.bpf
def test_with_nothing_but_the_three_capabilities_the_trial_succeeds() -> None:
    three = "-all,+bpf,+net_admin,+perfmon"
    bounded = ["setpriv", "--no-new-privs", f"--inh-caps={three}", f"--bounding-set={three}"]
    command = [*bounded, sys.executable, "-m", "dynamix.cli.main", "doctor", "--ebpf", "--json", "-"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DYNAMIX_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    found = {check["name"]: check["found"] for check in json.loads(done.stdout)["findings"]}
    assert found["rights"] == "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN"
    assert found["bpf()"] == "the kernel took a program of two instructions"
    assert found["trial"].endswith("counted 1,000,000 bytes exactly, detached")
