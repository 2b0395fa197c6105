"""Tests marked `bpf`: they run as root where eBPF does, and elsewhere the end of the run says loudly that they did not.

A pytest plugin (see tests/conftest.py). With REQUIRE_BPF_TESTS=1, which CI sets once it has installed what they need,
a test that cannot run fails instead.
"""

import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from dynamix.collector.ebpf.loader import find_bcc, find_headers
from dynamix.collector.ebpf.probe import v2_mount

MARK = "bpf"
REQUIRED = "REQUIRE_BPF_TESTS"
"""Not DYNAMIX_...: a service refuses settings of ours that it does not know."""
WHERE = "docs/operations.md, Kernel probes"
NEEDED_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Bits that a container may lack although its user is root: for links and rates, for namespaces and programs."""
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


@cache
def missing() -> str | None:
    """What a test of kernel probes or network namespaces lacks here, as one sentence; `None` when it can run."""
    lacks = [*_rights(), *_installed()]
    return f"lacking: {'; '.join(lacks)}" if lacks else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is set up."""
    if item.get_closest_marker(MARK) is None or (reason := missing()) is None:
        return
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, and yet {reason}; see {WHERE}", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Whatever was asked to be shown; under xdist, too, where the tests were skipped in other processes."""
    skipped = cast("list[pytest.TestReport]", terminalreporter.stats.get("skipped", []))
    reasons = Counter(_reason(report) for report in skipped if MARK in getattr(report, "keywords", ()))
    if not reasons:
        return
    terminalreporter.section("NOT TESTED HERE: eBPF and network namespaces", sep="!", yellow=True, bold=True)
    for reason, number in reasons.items():
        tests = "1 bpf test" if number == 1 else f"{number} bpf tests"
        terminalreporter.write_line(f"{tests} did not run: {reason}; see {WHERE}", yellow=True)


def _reason(report: pytest.TestReport) -> str:
    assert isinstance(report.longrepr, tuple)
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def _rights() -> list[str]:
    if os.geteuid() != 0:
        return ["root"]
    status = Path("/proc/self/status").read_text()
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return [name for name, bit in NEEDED_CAPABILITIES.items() if not effective >> bit & 1]


def _installed() -> list[str]:
    lacks = [f"`{name}` ({package})" for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if find_bcc() is None:
        lacks.append("bcc (python3-bpfcc)")
    if find_headers() is None:
        lacks.append("kernel headers (linux-headers-amd64)")
    if v2_mount(Path("/proc/self/mountinfo").read_text()) is None:
        lacks.append("a mounted cgroup v2")
    return lacks
