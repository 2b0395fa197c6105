"""install.sh and uninstall.sh, tried into a root directory: what is where, twice, with an operator's edits kept."""

import hashlib
import os
import shutil
import subprocess
import sys
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
    """Without what it depends on: that is for pip."""
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "DESTDIR": str(root),
        "PYTHON": os.path.realpath(sys.executable),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
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
    before = (installed / "credentials/reward.password").read_text()
    (installed / "credentials/reward.password").unlink()
    for name in ("etc/dynamix", "opt/dynamix/share/dynamix/installed"):  # as an older version had it
        (root / name / "nats.conf").write_text("# older\n")

    told = run("install.sh", root, str(wheel)).stdout
    assert (installed / "dynamix.env").read_text() == "DYNAMIX_NODE=node-a\n"
    assert (installed / "dynamix.env.new").read_text() == (ROOT / "deploy/systemd/dynamix.env").read_text()
    assert told == f"kept {installed}/dynamix.env, which was edited; the new one is {installed}/dynamix.env.new\n"
    assert (installed / "nats.conf").read_text() == (ROOT / "deploy/nats.conf").read_text()
    assert (installed / "credentials/reward.password").read_text() != before

    shutil.copy(installed / "dynamix.env.new", installed / "dynamix.env")
    assert run("install.sh", root, str(wheel)).stdout == ""
    assert not (installed / "dynamix.env.new").exists()


def test_a_machine_that_only_trains_has_the_collector_and_no_password_is_made_up(root: Path, wheel: Path) -> None:
    run("install.sh", root, "--node", "--ebpf", str(wheel))
    assert units(root) == {"dynamix-collector.service", "dynamix-train@.service"}
    drop_ins = [str(path.relative_to(root / UNITS)) for path in (root / UNITS).glob("*.d/*.conf")]
    assert drop_ins == ["dynamix-collector.service.d/ebpf.conf"]
    assert list((root / "etc/dynamix/credentials").iterdir()) == []
    before = tree(root)
    run("install.sh", root, str(wheel))
    assert tree(root) == before, "the options still hold"
    (root / UNITS / "dynamix-collector.service.d/mine.conf").write_text("[Service]\n")
    run("uninstall.sh", root)
    assert set(tree(root / UNITS)) == {"dynamix-collector.service.d/mine.conf"}


@pytest.mark.skipif(shutil.which("systemctl", path="/usr/bin:/bin") is None, reason="systemctl is MISSING here")
def test_the_services_are_enabled_but_not_the_learner(root: Path, wheel: Path) -> None:
    run("install.sh", root, "--tls", str(wheel))
    wanted = {path.name for path in (root / UNITS / "multi-user.target.wants").iterdir()}
    assert wanted == ON_THE_BROKERS_MACHINE - {"dynamix-train@.service"}
    assert (root / UNITS / "dynamix-nats.service.d/tls.conf").is_file()


def test_a_shard_has_instances_of_the_units_once_its_keys_are_there(root: Path, wheel: Path) -> None:
    def instances() -> set[str]:
        wanted = root / UNITS / "multi-user.target.wants"
        return {path.name for path in wanted.glob("*@b.service")}

    installed = run("install.sh", root, "--ebpf", "--shard", "b", str(wheel))
    templates = {f"dynamix-{service}@.service" for service in (*SERVICES, "provision")}
    assert units(root) == ON_THE_BROKERS_MACHINE | templates
    for name in (*SERVICES, "provision"):
        template = root / UNITS / f"dynamix-{name}@.service"
        assert template.read_text() == (ROOT / f"deploy/systemd/dynamix-{name}.service").read_text()
        assert (root / UNITS / f"dynamix-{name}@.service.d/shard.conf").is_file()
    assert (root / UNITS / "dynamix-collector@.service.d/ebpf.conf").is_file()
    credentials = root / "etc/dynamix/credentials"
    keys = [f"b-{name}.nkey" for name in ("provision", "reward", "arbitrator", "collector")]
    missing = " ".join(f"/etc/dynamix/credentials/{key}" for key in keys)
    assert "shard b is not started yet: make its keys (README.md, Shards)" in installed.stdout
    assert f"run this again with --shard b; missing: {missing}\n" in installed.stdout
    assert instances() == set()

    for key in keys:
        (credentials / key).write_text("SU\n")
    assert "shard b" not in run("install.sh", root, "--shard", "b", "--shard", "b", str(wheel)).stdout
    if shutil.which("systemctl", path="/usr/bin:/bin"):
        assert instances() == {name.replace("@", "@b") for name in templates}
        (credentials / keys[0]).unlink()
        assert keys[0] in run("install.sh", root, str(wheel)).stdout, "a shard that was enabled is remembered"
    run("uninstall.sh", root)
    assert tree(root / UNITS) == {}


def test_a_shard_has_a_learner_where_the_machine_has_one_and_its_key_is_there(root: Path, wheel: Path) -> None:
    learner = root / UNITS / "multi-user.target.wants/dynamix-learner@b.service"
    credentials = root / "etc/dynamix/credentials"
    credentials.mkdir(parents=True, mode=0o700)
    for name in ("provision", "reward", "arbitrator", "collector"):
        (credentials / f"b-{name}.nkey").write_text("SU\n")
    run("install.sh", root, "--learner", "--shard", "b", str(wheel))
    assert (root / UNITS / "dynamix-learner@.service.d/shard.conf").is_file()
    assert not learner.is_symlink(), "a shard needs none"
    (credentials / "b-learner.nkey").write_text("SU\n")
    run("install.sh", root, str(wheel))
    assert learner.is_symlink() == (shutil.which("systemctl", path="/usr/bin:/bin") is not None)
    run("uninstall.sh", root)
    assert tree(root / UNITS) == {}


def test_a_machine_that_only_trains_has_the_collector_of_a_shard(root: Path, wheel: Path) -> None:
    said = run("install.sh", root, "--node", "--shard", "b", str(wheel)).stdout
    assert units(root) == {"dynamix-collector.service", "dynamix-collector@.service", "dynamix-train@.service"}
    assert said.count("\n") == 1, "the first account's password is not asked for"
    assert said.endswith("missing: /etc/dynamix/credentials/b-collector.nkey\n")
    (root / "etc/dynamix/credentials/b-collector.nkey").write_text("SU\n")
    said = run("install.sh", root, "--shard", "b", str(wheel)).stdout
    wanted = root / UNITS / "multi-user.target.wants"
    if shutil.which("systemctl", path="/usr/bin:/bin"):
        assert said == ""
        assert {path.name for path in wanted.iterdir()} == {"dynamix-collector@b.service"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes"], "install.sh: unknown option --nodes: see --help"),
        (["dist"], "install.sh: dist is no wheel: name a file that ends with .whl, or none"),
        (["--shard"], "install.sh: --shard wants the name of a shard"),
        (["--shard", "--node"], "install.sh: '--node' is no shard: name it as `dynamix keys shard` did"),
        (["--shard", "b" * 64], f"install.sh: '{'b' * 64}' is no shard: a name has at most 63 characters"),
        (["--shard", "B"], "install.sh: 'B' is no shard: name it as `dynamix keys shard` did"),
        (["none.whl"], "install.sh: there is no none.whl"),
        (["--node", "--tls"], "install.sh: --tls and --learner are for the broker's machine, not for --node"),
    ],
)
def test_what_cannot_be_installed_is_refused_before_anything_is(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    refused = run("install.sh", tmp_path, *arguments, check=False)
    assert (refused.returncode, refused.stderr) == (1, sentence + "\n")
    assert list(tmp_path.iterdir()) == []


def test_what_only_the_operator_has_is_named_in_its_order_before_anything_starts(root: Path, wheel: Path) -> None:
    def wanting(*arguments: str) -> str:
        return run("install.sh", root, *arguments, str(wheel)).stdout

    assert wanting("--tls").startswith(
        "nothing is started yet: put the broker's certificate and key into /etc/dynamix/tls"
    )
    (root / "etc/dynamix/tls").mkdir()
    for name in ("certificate.pem", "key.pem"):
        (root / "etc/dynamix/tls" / name).write_text("-----BEGIN\n")
    assert wanting().startswith(
        "nothing is started yet: name the broker in /etc/dynamix/dynamix.env as its certificate"
    )
    (root / "etc/dynamix/dynamix.env").write_text("DYNAMIX_NATS_URL=tls://broker.example:4222\n")
    assert wanting().startswith("kept ")


def test_a_machine_that_only_trains_wants_a_password_or_a_key(root: Path, wheel: Path) -> None:
    assert "copy collector.password" in run("install.sh", root, "--node", str(wheel)).stdout
    (root / "etc/dynamix/credentials/collector.nkey").write_text("SU\n")
    assert run("install.sh", root, str(wheel)).stdout == ""


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
