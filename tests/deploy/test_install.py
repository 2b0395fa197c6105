"""install.sh and uninstall.sh, tried into a root directory: what is where, twice, with an operator's edits kept."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = "etc/systemd/system"
SERVICES = ("collector", "reward", "arbitrator")
ON_THE_BROKERS_MACHINE = {*(f"dynamix-{name}.service" for name in (*SERVICES, "nats", "provision", "train@"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (built,) = directory.glob("dynamix_batch-*.whl")
    return built


def run(script: str, root: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Without what it depends on, which is lent from here: that is for pip."""
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "DESTDIR": str(root),
        "PYTHON": os.path.realpath(sys.executable),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }
    command = ["sh", str(ROOT / "deploy" / script), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=check)


def tree(root: Path) -> dict[str, str]:
    """Every file and link but compiled modules and pip's records: what it is, and its mode."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file() and path.suffix != ".pyc" and ".dist-info/" not in name:
            found[name] = f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    return found


def check_modes(etc: Path) -> None:
    """Secrets are readable by their owner only."""
    open_to_others = {path.name for path in etc.rglob("*") if path.stat().st_mode & 0o077}
    assert open_to_others == {"ca.pem", "accounts.conf", "nats.conf", "dynamix.env", "train"}
    assert {path.name for path in (etc / "credentials").iterdir()} == {
        f"{name}.creds" for name in (*SERVICES, "learner", "provision", "watcher")
    }


def units(root: Path) -> set[str]:
    return {path.name for path in (root / UNITS).glob("*.service")}


def names_of(certificate: Path) -> set[str]:
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {word.strip(" ,") for word in shown.splitlines()[1].split(", ")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_brokers_machine_is_installed_updated_and_uninstalled(tmp_path: Path, wheel: Path) -> None:
    """A second run changes nothing; edits are kept; certificates are made again for new names only."""
    root = tmp_path / "root"
    run("install.sh", root, "--host", "a.example", str(wheel))
    etc, share = root / "etc/dynamix", root / "opt/dynamix/share/dynamix/installed"
    assert units(root) == ON_THE_BROKERS_MACHINE
    drop_ins = [str(path.relative_to(root / UNITS)) for path in (root / UNITS).glob("*.d/*.conf")]
    assert drop_ins == ["dynamix-nats.service.d/other-machines.conf"]
    if shutil.which("systemctl", path="/usr/bin:/bin"):
        wanted = {path.name for path in (root / UNITS / "multi-user.target.wants").iterdir()}
        assert wanted == ON_THE_BROKERS_MACHINE - {"dynamix-train@.service"}
    check_modes(etc)
    certificate, authority = etc / "tls/certificate.pem", (etc / "ca.pem").read_text()
    assert names_of(certificate) >= {"DNS:a.example", "DNS:localhost", "IP Address:127.0.0.1"}

    program = root / "opt/dynamix/bin"
    assert (program / "dynamix").read_text().startswith("#!/opt/dynamix/bin/python")
    command = ["grep", "-rlIF", str(root), str(program), str(root / UNITS)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
    found = subprocess.run(
        [program / "python", "-c", "import dynamix.schemas as package; print(package.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(f"{root}/opt/dynamix/lib/")

    (etc / "dynamix.env").write_text("DYNAMIX_NODE=node-a\n")
    for file in (etc / "nats.conf", share / "nats.conf", share / "dynamix.env"):  # as an older version had them
        file.write_text("# older\n")
    told = run("install.sh", root, "--host", "10.0.0.7", str(wheel)).stdout
    assert (etc / "dynamix.env").read_text() == "DYNAMIX_NODE=node-a\n"
    assert (etc / "dynamix.env.new").read_text() == (ROOT / "deploy/systemd/dynamix.env").read_text()
    assert f"kept {etc}/dynamix.env" in told
    assert (etc / "nats.conf").read_text() == (ROOT / "deploy/nats.conf").read_text()
    assert names_of(certificate) >= {"DNS:a.example", "IP Address:10.0.0.7"}
    assert (etc / "ca.pem").read_text() == authority

    shutil.copy(etc / "dynamix.env.new", etc / "dynamix.env")
    before = tree(root)
    assert run("install.sh", root, str(wheel)).stdout == ""
    assert before.pop("etc/dynamix/dynamix.env.new")
    assert tree(root) == before
    check_modes(etc)

    run("uninstall.sh", root)
    kept = tree(root)
    assert kept
    assert all(name.startswith("etc/dynamix/") for name in kept)
    run("uninstall.sh", root, "--purge")
    assert tree(root) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_that_only_trains_has_the_collector_and_asks_for_two_files(tmp_path: Path, wheel: Path) -> None:
    root = tmp_path / "root"
    told = run("install.sh", root, "--node", "broker.example", "--ebpf", str(wheel)).stdout
    assert "missing: /etc/dynamix/ca.pem /etc/dynamix/credentials/collector.creds" in told
    assert units(root) == {"dynamix-collector.service", "dynamix-train@.service"}
    drop_ins = [str(path.relative_to(root / UNITS)) for path in (root / UNITS).glob("*.d/*.conf")]
    assert drop_ins == ["dynamix-collector.service.d/ebpf.conf"]
    etc = root / "etc/dynamix"
    assert (etc / "credentials").stat().st_mode & 0o777 == 0o700
    assert not (etc / "authority").exists()
    assert "DYNAMIX_NATS_URL=tls://broker.example:4222\n" in (etc / "dynamix.env").read_text()
    before = tree(root)
    for name in ("ca.pem", "credentials/collector.creds"):
        (etc / name).write_text("from the broker\n")
    assert run("install.sh", root, str(wheel)).stdout == ""
    assert tree(root).items() >= before.items(), "a second run keeps the options of the first"
    (root / UNITS / "dynamix-collector.service.d/mine.conf").write_text("[Service]\n")
    run("uninstall.sh", root)
    assert set(tree(root / UNITS)) == {"dynamix-collector.service.d/mine.conf"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes"], "unknown option --nodes"),
        (["dist"], "dist is not a wheel"),
        (["--host", "a/b"], "--host needs a host name or an address"),
        (["none.whl"], "there is no none.whl"),
        (["--node", "b", "--learner"], "--host and --learner are for the broker's machine"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_installed(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    refused = run("install.sh", tmp_path, *arguments, check=False)
    assert refused.returncode == 1
    assert sentence in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs here: this would install")
def test_without_systemd_nothing_is_installed() -> None:
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": "/bin/false"}
    command = ["sh", str(ROOT / "deploy/install.sh")]
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "systemd does not run here" in refused.stderr
