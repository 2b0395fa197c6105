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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An installation from nothing."""
    root = tmp_path_factory.mktemp("program")
    run("install.sh", root, str(wheel))
    return root


@pytest.fixture
def root(tmp_path: Path, program: Path) -> Path:
    """A directory that has the environment already, which takes longest, and nothing else."""
    directory = tmp_path / "root"
    shutil.copytree(program / "opt", directory / "opt", symlinks=True, ignore=shutil.ignore_patterns("share"))
    return directory


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
    """Others can read what is no secret only."""
    open_to_others = {path.name for path in etc.rglob("*") if path.stat().st_mode & 0o077}
    assert open_to_others == {"ca.pem", "accounts.conf", "nats.conf", "dynamix.env", "train"}
    assert {path.name for path in (etc / "credentials").iterdir()} == {
        f"{name}.creds" for name in (*SERVICES, "learner", "provision", "watcher")
    }


def units(root: Path) -> set[str]:
    return {path.name for path in (root / UNITS).glob("*.service")}


def test_a_second_run_changes_nothing_and_uninstall_leaves_what_is_the_operators(
    tmp_path: Path, program: Path, wheel: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(program, root, symlinks=True)
    first = tree(root)
    assert units(root) == ON_THE_BROKERS_MACHINE
    assert (root / "etc/dynamix/nats.conf").read_text() == (ROOT / "deploy/nats.conf").read_text()
    assert (root / "etc/dynamix/credentials").stat().st_mode & 0o777 == 0o700
    assert not list((root / UNITS).glob("*.service.d/*")), "drop-ins are asked for"
    check_modes(root / "etc/dynamix")

    run("install.sh", root, str(wheel))
    assert tree(root) == first

    run("uninstall.sh", root)
    kept = tree(root)
    assert kept
    assert all(name.startswith("etc/dynamix/") for name in kept)
    assert run("uninstall.sh", root).returncode == 0
    assert tree(root) == kept

    run("uninstall.sh", root, "--purge")
    assert tree(root) == {}


def test_the_program_that_was_installed_knows_nothing_of_the_directory_it_was_made_in(program: Path) -> None:
    root = program
    script = root / "opt/dynamix/bin/dynamix"
    assert script.read_text().startswith("#!/opt/dynamix/bin/python")
    named = subprocess.run(
        ["grep", "-rlIF", "--include=*", str(root), str(root / "opt/dynamix/bin"), str(root / UNITS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert named.stdout == ""
    found = subprocess.run(
        [root / "opt/dynamix/bin/python", "-c", "import dynamix.schemas as package; print(package.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(f"{root}/opt/dynamix/lib/")


def test_edited_configuration_stays_and_unedited_is_brought_up_to_date(root: Path, wheel: Path) -> None:
    run("install.sh", root, str(wheel))
    installed = root / "etc/dynamix"
    (installed / "dynamix.env").write_text("DYNAMIX_NODE=node-a\n")
    for name in ("etc/dynamix", "opt/dynamix/share/dynamix/installed"):  # as an older version had it
        (root / name / "nats.conf").write_text("# older\n")

    (root / "opt/dynamix/share/dynamix/installed/dynamix.env").write_text("# older\n")

    told = run("install.sh", root, str(wheel)).stdout
    assert (installed / "dynamix.env").read_text() == "DYNAMIX_NODE=node-a\n"
    assert (installed / "dynamix.env.new").read_text() == (ROOT / "deploy/systemd/dynamix.env").read_text()
    assert told == f"kept {installed}/dynamix.env, which was edited; the new one is {installed}/dynamix.env.new\n"
    assert (installed / "nats.conf").read_text() == (ROOT / "deploy/nats.conf").read_text()
    assert run("install.sh", root, str(wheel)).stdout == "", "it was said once"

    shutil.copy(installed / "dynamix.env.new", installed / "dynamix.env")
    assert run("install.sh", root, str(wheel)).stdout == ""
    assert not (installed / "dynamix.env.new").exists()


def test_a_machine_that_only_trains_has_the_collector_and_asks_for_two_files(root: Path, wheel: Path) -> None:
    told = run("install.sh", root, "--node", "broker.example", "--ebpf", str(wheel)).stdout
    assert "missing: /etc/dynamix/ca.pem /etc/dynamix/credentials/collector.creds" in told
    assert units(root) == {"dynamix-collector.service", "dynamix-train@.service"}
    drop_ins = [str(path.relative_to(root / UNITS)) for path in (root / UNITS).glob("*.d/*.conf")]
    assert drop_ins == ["dynamix-collector.service.d/ebpf.conf"]
    etc = root / "etc/dynamix"
    assert list((etc / "credentials").iterdir()) == []
    assert (etc / "credentials").stat().st_mode & 0o777 == 0o700
    assert not (etc / "authority").exists()
    assert "DYNAMIX_NATS_URL=tls://broker.example:4222\n" in (etc / "dynamix.env").read_text()
    before = tree(root)
    for name in ("ca.pem", "credentials/collector.creds"):
        (etc / name).write_text("from the broker\n")
    assert run("install.sh", root, str(wheel)).stdout == ""
    assert tree(root).items() >= before.items(), "the options still hold"
    (root / UNITS / "dynamix-collector.service.d/mine.conf").write_text("[Service]\n")
    run("uninstall.sh", root)
    assert set(tree(root / UNITS)) == {"dynamix-collector.service.d/mine.conf"}


@pytest.mark.skipif(shutil.which("systemctl", path="/usr/bin:/bin") is None, reason="systemctl is MISSING here")
def test_the_services_are_enabled_but_not_the_learner(root: Path, wheel: Path) -> None:
    run("install.sh", root, "--host", "broker.example", str(wheel))
    wanted = {path.name for path in (root / UNITS / "multi-user.target.wants").iterdir()}
    assert wanted == ON_THE_BROKERS_MACHINE - {"dynamix-train@.service"}
    assert (root / UNITS / "dynamix-nats.service.d/other-machines.conf").is_file()


def test_certificates_have_all_names_and_are_made_again_only_when_one_is_new(root: Path, wheel: Path) -> None:
    def names() -> set[str]:
        command = ["openssl", "x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {word.strip(" ,") for word in shown.splitlines()[1].split(", ")}

    certificate = root / "etc/dynamix/tls/certificate.pem"
    run("install.sh", root, "--host", "a.example", "--host", "10.0.0.7", str(wheel))
    assert {"DNS:a.example", "IP Address:10.0.0.7", "DNS:localhost", "IP Address:127.0.0.1"} <= names()
    before, authority = certificate.read_text(), (root / "etc/dynamix/ca.pem").read_text()
    run("install.sh", root, str(wheel))
    assert certificate.read_text() == before
    run("install.sh", root, "--host", "b.example", str(wheel))
    assert {"DNS:a.example", "IP Address:10.0.0.7", "DNS:b.example"} <= names()
    assert (root / "etc/dynamix/ca.pem").read_text() == authority
    check_modes(root / "etc/dynamix")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes"], "install.sh: unknown option --nodes: see --help"),
        (["dist"], "install.sh: dist is not a wheel: name a file that ends with .whl, or none"),
        (["--host"], "install.sh: --host needs a host name or an address"),
        (["--node", "--ebpf"], "install.sh: --node needs a host name or an address"),
        (["--host", "a/b"], "install.sh: --host needs a host name or an address"),
        (["none.whl"], "install.sh: there is no none.whl"),
        (["--node", "b", "--learner"], "install.sh: --host and --learner are for the broker's machine, not for --node"),
    ],
)
def test_what_cannot_be_installed_is_refused_before_anything_is(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    refused = run("install.sh", tmp_path, *arguments, check=False)
    assert (refused.returncode, refused.stderr) == (1, sentence + "\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs here: this would install")
def test_without_systemd_nothing_is_installed_and_other_ways_are_named() -> None:
    # were it not refused before, it would be for this interpreter
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": "/bin/false"}
    command = ["sh", str(ROOT / "deploy/install.sh")]
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("install.sh: systemd does not run here: deploy/README.md has other ways")


@pytest.mark.parametrize("script", ["install.sh", "uninstall.sh"])
def test_help_is_the_head_of_the_script(tmp_path: Path, script: str) -> None:
    shown = run(script, tmp_path, "--help").stdout
    assert f"sh deploy/{script}" in shown
    assert "set -eu" not in shown
