"""The systemd units: systemd itself accepts them, and every one is closed as far as its work allows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamix.runtime.settings import SharedSettings

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = ("collector", "reward", "arbitrator", "learner")
MODULES = {service: f"dynamix.{service}" for service in SERVICES} | {"learner": "dynamix.arbitrator.learning"}
ALWAYS_CLOSED = (
    "DynamicUser=yes",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "ProtectKernelModules=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
)
MAX_EXPOSURE = {
    "dynamix-nats.service": 1.5,
    "dynamix-provision.service": 1.5,
    "dynamix-reward.service": 1.5,
    "dynamix-arbitrator.service": 1.5,
    "dynamix-learner.service": 1.5,
    "dynamix-train@.service": 2.0,
    "dynamix-collector.service": 2.3,
}
"""systemd's own measure with all drop-ins, 0 (closed) to 10, with a little room for other versions of it.

The collector's is with eBPF: its three capabilities, and other users' processes that it looks up.
"""
EBPF = "dynamix-collector.service.d/ebpf.conf"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is MISSING: the units are NOT checked here (Debian: apt-get install systemd)",
)


def text(name: str) -> str:
    return (UNITS / name).read_text()


def directives(name: str) -> list[str]:
    """Its lines without comments."""
    return [line for line in text(name).splitlines() if line and not line.startswith("#")]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with programs that exist here (`verify` refuses a unit whose program is missing) and all drop-ins."""
    for unit in UNITS.glob("*.service"):
        lines = re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", unit.read_text(), flags=re.MULTILINE)
        lines = re.sub(r"^Documentation=file:\S+$", "", lines, flags=re.MULTILINE)
        name = unit.name.replace("@.", "@mnist.")  # a template is verified as an instance
        (tmp_path / name).write_text(lines)
    for drop_in in UNITS.glob("*.service.d/*.conf"):
        folder = tmp_path / drop_in.parent.name.replace("@.", "@mnist.")
        folder.mkdir(exist_ok=True)
        lines = re.sub(r"^(ExecStart=)/\S+", r"\1/bin/true", drop_in.read_text(), flags=re.MULTILINE)
        (folder / drop_in.name).write_text(lines)
    return tmp_path


def verify(directory: Path) -> subprocess.CompletedProcess[str]:
    units = sorted(str(unit) for unit in directory.glob("*.service"))
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )


@needs_systemd
def test_systemd_verifies_every_unit(installed: Path) -> None:
    found = verify(installed)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@needs_systemd
def test_a_misspelt_directive_would_be_found(installed: Path) -> None:
    unit = installed / "dynamix-reward.service"
    unit.write_text(unit.read_text().replace("DynamicUser=", "DynamicUsr="))
    assert "DynamicUsr" in verify(installed).stderr


@needs_systemd
@pytest.mark.parametrize(
    ("file", "directive"),
    [
        ("dynamix-nats.service.d/within-cluster.conf", "EnvironmentFile"),
        (EBPF, "AmbientCapabilities"),
    ],
)
def test_a_misspelt_directive_of_a_drop_in_would_be_found(installed: Path, file: str, directive: str) -> None:
    drop_in = installed / file
    drop_in.write_text(drop_in.read_text().replace(f"{directive}=", f"{directive}x="))
    assert f"{directive}x" in verify(installed).stderr


def exposure(unit: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """systemd's judgement; it fails beyond the limit, which it takes in tenths."""
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={10 * limit:.0f}", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_systemd
@pytest.mark.parametrize(
    ("name", "limit"), [(name.replace("@.", "@mnist."), limit) for name, limit in MAX_EXPOSURE.items()]
)
def test_a_unit_stays_closed(installed: Path, name: str, limit: float) -> None:
    judged = exposure(installed / name, limit)
    assert "Overall exposure level" in judged.stdout
    assert judged.returncode == 0, judged.stdout


@needs_systemd
def test_a_unit_that_was_opened_would_be_found(installed: Path) -> None:
    unit = installed / "dynamix-reward.service"
    unit.write_text(unit.read_text().replace("PrivateUsers=yes", "").replace("CapabilityBoundingSet=\n", ""))
    assert exposure(unit, MAX_EXPOSURE[unit.name]).returncode == 1


@pytest.mark.parametrize("name", MAX_EXPOSURE)
def test_no_unit_leaves_out_what_every_unit_can_have(name: str) -> None:
    assert [line for line in ALWAYS_CLOSED if line not in text(name).splitlines()] == []


@pytest.mark.parametrize("name", [*(f"dynamix-{service}.service" for service in SERVICES), "dynamix-nats.service"])
def test_systemd_restarts_a_service_for_ever(name: str) -> None:
    unit, service = text(name).split("[Service]")
    assert "StartLimitIntervalSec=0" in unit.splitlines()
    assert "Restart=always" in service.splitlines()


@pytest.mark.parametrize("service", SERVICES)
def test_systemd_waits_until_a_service_is_ready_and_ends_it_when_it_shows_no_sign_of_life(service: str) -> None:
    lines = text(f"dynamix-{service}.service").splitlines()
    assert {"Type=notify", "NotifyAccess=main", "WatchdogSec=60"} <= set(lines)
    assert SharedSettings().stuck_after_s < 60, "it first ends by itself, and says where it was stuck"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_waits_for_its_broker_for_ever_and_the_machines_boot_does_not_wait_for_it(service: str) -> None:
    lines = text(f"dynamix-{service}.service").splitlines()
    assert "TimeoutStartSec=infinity" in lines
    (after,) = [line for line in lines if line.startswith("After=")]
    assert "multi-user.target" in after.split()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_runs_its_own_module_with_its_own_credential(service: str) -> None:
    lines = text(f"dynamix-{service}.service").splitlines()
    assert f"ExecStart=/opt/dynamix/bin/python -m {MODULES[service]}" in lines
    assert "Environment=DYNAMIX_NATS_CREDS_FILE=%d/key" in lines
    assert f"LoadCredential=key:/etc/dynamix/credentials/{service}.creds" in lines


def test_each_service_has_a_port_of_metrics_of_its_own_on_loopback() -> None:
    units = {service: text(f"dynamix-{service}.service") for service in SERVICES}
    ports = {service: re.findall(r"DYNAMIX_METRICS_PORT=(\d+)", unit) for service, unit in units.items()}
    assert ports == {"collector": ["9601"], "reward": ["9602"], "arbitrator": ["9603"], "learner": ["9604"]}
    assert not any("METRICS_HOST" in unit for unit in units.values())


def test_no_unit_keeps_a_capability() -> None:
    bounding = {name: re.findall(r"^CapabilityBoundingSet=(.*)$", text(name), re.MULTILINE) for name in MAX_EXPOSURE}
    assert {name: sets for name, sets in bounding.items() if sets != [""]} == {}


def test_ebpf_takes_three_capabilities_and_one_system_call_and_nothing_else() -> None:
    assert directives(EBPF) == [
        "[Service]",
        "AmbientCapabilities=CAP_BPF CAP_NET_ADMIN CAP_PERFMON",
        "CapabilityBoundingSet=",
        "CapabilityBoundingSet=CAP_BPF CAP_NET_ADMIN CAP_PERFMON",
        "SystemCallFilter=bpf",
        "LimitMEMLOCK=infinity",
    ]
