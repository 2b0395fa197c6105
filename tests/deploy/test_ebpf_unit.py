"""The eBPF probe inside of what the collector's unit leaves open, with its drop-in and without."""

import ctypes.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from tests.support.unit_sandbox import read_unit, run_as_unit

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/systemd/dynamix-collector.service"
DROP_IN = ROOT / "deploy/systemd/dynamix-collector.service.d/ebpf.conf"
PROGRAM = [sys.executable, "-m", "dynamix.cli.main", "doctor", "--ebpf", "--json", "-"]

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.skipif(
        shutil.which("systemd-analyze") is None or ctypes.util.find_library("seccomp") is None,
        reason="systemd-analyze or libseccomp is MISSING: the unit's system calls are NOT tried here",
    ),
]


def test_the_drop_in_opens_all_that_the_probe_needs() -> None:
    done = run_as_unit(read_unit(UNIT, DROP_IN), PROGRAM, ROOT)
    assert done.stdout, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["rights"]["found"] == "CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN"
    assert "/usr/src/" in found["headers"]["found"]
    assert found["trial"]["found"].endswith("counted 1,000,000 bytes exactly, detached")
