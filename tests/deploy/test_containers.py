"""The deployment in containers for real: `deploy/up.sh` under podman, then pods of the Kubernetes manifests.

Images are kept in out/containers, so that a second run takes minutes; containers and networks are removed. Where no
registry can be reached, debootstrap makes the base image.
"""

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.manifests import base, documents, find

ROOT = Path(__file__).parents[2]
WORK = ROOT / "out" / "containers"
BASE = "docker.io/library/debian:bookworm-slim"
SERVICES = ("collector", "reward", "arbitrator")
NODE, OTHER_NODE, HOST = "node-a", "node-b", "dynamix-nats.dynamix"
MEMORY = {"nats": 4 << 30, "collector": 1 << 30, "reward": 1 << 30, "arbitrator": 1 << 30}
NETWORK = "dynamix_default"
CLOSED = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp")
BUILD = ("--isolation", "oci", "--ignorefile", "deploy/Dockerfile.dockerignore", "-f", "deploy/Dockerfile")


def missing() -> str:
    """What this machine lacks, or nothing."""
    if os.geteuid() != 0:
        return "not root"
    needed = (
        "podman",
        "runc",
        "catatonit",
        "netavark:/usr/lib/podman/netavark",
        "aardvark-dns:/usr/lib/podman/aardvark-dns",
    )
    lacking = [name for name, _, path in (one.partition(":") for one in needed) if not shutil.which(path or name)]
    return f"missing: apt-get install {' '.join(lacking)}" if lacking else ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=f"{missing()}: nothing is run in containers here"),
]


class Podman:
    """podman with settings and storage of its own; `clone` is the repository in which it builds."""

    def __init__(self, directory: Path) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self.clone = directory / "clone"
        plain, build = WORK / "containers.conf", WORK / "build.conf"
        engine = '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n[network]\nnetwork_backend = "netavark"\n'
        engine += f'network_config_dir = "{WORK}/networks"\n'
        limits = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        plain.write_text(limits + engine)
        build.write_text(limits + f"volumes = {json.dumps(pip_of_this_machine())}\n" + engine)
        storage = WORK / "storage.conf"
        driver = "overlay" if "overlay" in Path("/proc/filesystems").read_text() else "vfs"
        places = f'graphroot = "{WORK}/storage"\nrunroot = "{WORK}/run"\n'
        storage.write_text(f'[storage]\ndriver = "{driver}"\n{places}')
        self.environ = {
            **os.environ,
            "CONTAINERS_CONF": str(plain),
            "CONTAINERS_STORAGE_CONF": str(storage),
            "DYNAMIX_NODE": NODE,
            "ENGINE": "podman",
            "COMPOSE": str(WORK / "compose"),
        }
        (WORK / "compose").write_text(
            f'#!/bin/sh\ncase " $* " in *" build "*) export CONTAINERS_CONF={build} ;; esac\n'
            f'exec {sys.executable} -m podman_compose "$@"\n'
        )
        (WORK / "compose").chmod(0o755)

    def __call__(self, *words: str, check: bool = True) -> str:
        done = self.run("podman", *words)
        assert not check or done.returncode == 0, f"podman {' '.join(words)}: {done.stderr[-3000:]}"
        return done.stdout.strip()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=self.clone, env=self.environ, capture_output=True, text=True, check=False)

    def sh(self, *words: str) -> None:
        """Run a command that must succeed."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-6000:]}"

    def compose(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.environ["COMPOSE"], "-f", "deploy/compose.yaml", "--profile", "tools", *words)

    def keys(self, *words: str) -> None:
        done = self.compose("run", "--rm", "--no-deps", "-T", "keys", *words)
        assert done.returncode == 0, done.stderr

    def is_healthy(self, container: str) -> bool:
        """The container's own health check; timers need systemd."""
        return self.succeeds("healthcheck", "run", container)

    def was_restarted(self, container: str) -> bool:
        return bool(self.inspect(container)["RestartCount"] > 0)

    def succeeds(self, *words: str) -> bool:
        return self.run("podman", *words).returncode == 0

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(self("inspect", container))[0]

    def remove(self) -> None:
        self("rm", "--force", "--all", "--depend", "--volumes", "--time", "1", check=False)
        self("pod", "rm", "--force", "--all", check=False)
        self("volume", "prune", "--force", check=False)
        self("network", "prune", "--force", check=False)


def pip_of_this_machine() -> list[str]:
    """Mounts by which a build has this machine's way to packages: a pip.conf, certificates, folders of packages."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.partition("=") for line in shown.splitlines() if line.startswith(("global.", ":env:."))]
    options = {key.rpartition(".")[2]: value.strip("'\"") for key, _, value in lines}
    mounts = []
    if cert := options.get("cert"):
        mounts.append(f"{cert}:/etc/host-certificates.crt:ro")
        options["cert"] = "/etc/host-certificates.crt"
    for word in " ".join(options.values()).split():
        path = Path(word.removeprefix("file://"))
        path = path.parent if path.name == "simple" else path  # an index, with its files beside it
        if path.is_absolute() and path.is_dir():
            mounts.append(f"{path}:{path}:ro")
    (WORK / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in options.items()))
    return [*mounts, f"{WORK}/pip.conf:/etc/pip.conf:ro"]


def make_base(podman: Podman) -> None:
    """The base image: of a registry, or of Debian's archive under its name."""
    if podman.run("podman", "image", "exists", BASE).returncode == 0:
        return
    if podman.run("timeout", "60", "podman", "pull", "--quiet", BASE).returncode == 0:
        return
    if shutil.which("debootstrap") is None:
        pytest.skip("no registry can be reached, and debootstrap is missing: there is no base image")
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        script = (
            f"unshare --mount --propagation private debootstrap --variant=minbase bookworm {folder}/base && "
            f"cd {folder}/base && rm -rf usr/share/doc/* usr/share/man/* usr/share/locale/* var/lib/apt/lists/* && "
            f"tar -C {folder}/base -c . | podman import - {BASE}"
        )
        podman.sh("sh", "-c", script)


def wait(what: Callable[[], bool], name: str) -> None:
    """Until it holds."""
    deadline_s = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline_s, f"not after 120 s: {name}"
        time.sleep(0.2)


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[Podman]:
    """An engine without containers, and a clone of what is committed or changed here."""
    podman = Podman(tmp_path)
    podman.clone.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (podman.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, podman.clone / name)
    lock = os.open(WORK, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # one test at a time has the engine
    podman.remove()
    try:
        yield podman
    finally:
        podman.remove()
        os.close(lock)


class Steps:
    """What the ranks of the job log: tests/support/steady_job.py."""

    def __init__(self, directory: Path) -> None:
        self._files = [directory / "rank-0.jsonl", directory / "rank-1.jsonl"]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        file = self._files[rank]
        return [json.loads(line) for line in file.read_text().splitlines()[:-1]] if file.exists() else []

    def num_changes(self) -> int:
        """How often both ranks took other batch sizes at the same step."""
        sizes = [{line["step"]: tuple(line["sizes"]) for line in self.lines(rank)} for rank in (0, 1)]
        common = sorted(sizes[0].keys() & sizes[1].keys())
        assert [sizes[0][step] for step in common] == [sizes[1][step] for step in common]
        return sum(sizes[0][one] != sizes[0][other] for one, other in itertools.pairwise(common))


def test_a_deployment_from_nothing_is_closed_and_decides_through_crashes_and_an_upgrade(
    podman: Podman, tmp_path: Path
) -> None:
    make_base(podman)
    podman.sh("sh", "deploy/up.sh", HOST)
    for name in ("nats", *SERVICES):
        wait(partial(podman.is_healthy, f"dynamix_{name}_1"), name)
    check_secrets(podman.clone / "deploy" / "secrets")
    for name in ("nats", *SERVICES):
        check_closed(podman, f"dynamix_{name}_1", MEMORY[name])
    check_broker_refuses(podman)

    environ = {**podman.environ, "CONTAINERS_CONF": str(WORK / "build.conf")}
    train = ["podman", "build", *BUILD, "--target", "train", "--tag", "dynamix-train:0.1.0", "."]
    subprocess.run(train, cwd=podman.clone, env=environ, check=True, capture_output=True)

    steps = Steps(start_job(podman, tmp_path))
    wait(lambda: steps.num_changes() > 0, "a decision")

    def goes_on() -> None:
        num = steps.num_changes()
        wait(lambda: steps.num_changes() > num + 1, "more decisions")

    for name in ("nats", *SERVICES):
        container = f"dynamix_{name}_1"
        os.kill(podman.inspect(container)["State"]["Pid"], signal.SIGKILL)
        wait(partial(podman.was_restarted, container), f"{name} restarts")
        wait(partial(podman.is_healthy, container), name)
        goes_on()

    before = {name: podman.inspect(f"dynamix_{name}_1")["Image"] for name in ("nats", *SERVICES)}
    with (podman.clone / "schemas/dynamix/schemas/__init__.py").open("a") as source:
        source.write("# a newer version\n")
    authority = (podman.clone / "deploy/secrets/authority/authority.json").read_text()
    podman.sh("sh", "deploy/up.sh", HOST)
    after = {name: podman.inspect(f"dynamix_{name}_1")["Image"] for name in ("nats", *SERVICES)}
    assert all((before[name] != after[name]) == (name != "nats") for name in before)
    assert (podman.clone / "deploy/secrets/authority/authority.json").read_text() == authority
    for name in SERVICES:
        wait(partial(podman.is_healthy, f"dynamix_{name}_1"), name)
    goes_on()

    check_pods(podman, tmp_path, goes_on)
    podman.keys("revoke", "alice")
    num = steps.num_changes()
    step = steps.lines(0)[-1]["step"]
    wait(lambda: steps.lines(0)[-1]["step"] > step + 50, "training goes on without the bus")
    assert steps.num_changes() <= num + 2, "a revoked key gets no decision, but for those that were under way"


def test_the_installation_under_systemd_is_secured_by_one_command_and_taken_back(podman: Podman) -> None:
    """Two machines, each a container with systemd: the broker's, and one that only trains."""
    make_base(podman)
    packages = "systemd python3-venv openssl procps"
    (podman.clone / "Systemd").write_text(
        f"FROM {BASE}\nRUN apt-get update && apt-get install --yes --no-install-recommends {packages}\n"
    )
    environ = {**podman.environ, "CONTAINERS_CONF": str(WORK / "build.conf")}
    build = ["podman", "build", "--isolation", "oci", "-f", "Systemd", "--tag", "systemd", "."]
    subprocess.run(build, cwd=podman.clone, env=environ, check=True, capture_output=True)
    podman("network", "create", "machines")
    mounts = [f"--volume={mount}" for mount in [*pip_of_this_machine(), f"{podman.clone}:/src:ro"]]
    for name in ("broker-a", "node-b"):
        machine = ["--name", name, "--hostname", name, "--network", "machines", "--privileged", "--systemd=always"]
        boot = "mount --make-rshared / && exec /lib/systemd/systemd"  # as on a machine: credentials are mounts
        podman("run", "--detach", *machine, *mounts, "localhost/systemd", "sh", "-c", boot)
        wait(partial(podman.succeeds, "exec", name, "systemctl", "is-system-running"), f"{name} boots")

    def on(machine: str, *words: str) -> str:
        return podman("exec", machine, *words)

    def ready(machine: str, *services: str) -> None:
        for name in services:
            wait(partial(is_active, machine, name), f"{name} is active")
            pid = on(machine, "systemctl", "show", "--value", "--property=MainPID", f"dynamix-{name}")
            status = on(machine, "cat", f"/proc/{pid}/status").splitlines()
            fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
            assert "0" not in fields["Uid"].split(), name
            assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0, name

    def is_active(machine: str, name: str) -> bool:
        return podman.succeeds("exec", machine, "systemctl", "is-active", f"dynamix-{name}")

    install = ("podman", "exec", "broker-a", "sh", "/src/deploy/install.sh", "--host", "broker-a")
    podman.sh(*install)
    ready("broker-a", "nats", *SERVICES)
    authority = on("broker-a", "cat", "/etc/dynamix/authority/authority.json")
    for name in ("nats", *SERVICES):
        show = ("systemctl", "show", "--value", "--property=NRestarts", f"dynamix-{name}")
        before = on("broker-a", *show)
        on("broker-a", "systemctl", "kill", "--signal=KILL", f"dynamix-{name}")
        wait(lambda show=show, before=before: on("broker-a", *show) != before, f"systemd restarts {name}")
        ready("broker-a", name)
    podman.sh(*install[:-2])
    ready("broker-a", "nats", *SERVICES)
    assert on("broker-a", "cat", "/etc/dynamix/authority/authority.json") == authority

    node = ("podman", "exec", "node-b", "sh", "/src/deploy/install.sh", "--node", "broker-a")
    podman.sh(*node)
    bus = ". /etc/dynamix/dynamix.env; export DYNAMIX_NATS_URL DYNAMIX_NATS_CA_FILE PATH=/opt/dynamix/bin:$PATH"
    name = on("node-b", "/opt/dynamix/bin/python", "-c", NODE_NAME)
    on("broker-a", "sh", "-c", f"{bus}; dynamix keys create b --role collector --node {name} -o /root/collector.creds")
    for file, place in (("/root/collector.creds", "credentials/collector.creds"), ("/etc/dynamix/ca.pem", "ca.pem")):
        copy = podman.clone / Path(place).name
        podman("cp", f"broker-a:{file}", str(copy))
        podman("cp", str(copy), f"node-b:/etc/dynamix/{place}")
    on("node-b", "systemctl", "start", "dynamix-collector")
    ready("node-b", "collector")

    on("broker-a", "sh", "/src/deploy/uninstall.sh", "--purge")
    left = on(
        "broker-a", "sh", "-c", "ls -d /etc/dynamix /opt/dynamix /var/lib/*dynamix* /etc/systemd/system/dynamix*; true"
    )
    assert left == ""


NODE_NAME = "from dynamix.runtime.settings import SharedSettings, node_name; print(node_name(SharedSettings()))"


def check_secrets(secrets: Path) -> None:
    """Nothing secret can be read by others, and each container's user has its own key."""
    public = {"ca.pem", "accounts.conf"}
    assert {path.name for path in secrets.iterdir() if path.stat().st_mode & 0o077} == public
    keys = [*secrets.glob("credentials/*"), secrets / "tls/key.pem"]
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in keys} == {(10001, 0o600)}
    assert {path.stat().st_mode & 0o777 for path in secrets.glob("authority/*")} == {0o600}


def check_closed(podman: Podman, container: str, memory: int) -> None:
    """Its process is no root, has no capability, can write nothing, and has a limit of memory."""
    found = podman.inspect(container)
    status = Path(f"/proc/{found['State']['Pid']}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert fields["NoNewPrivs"] == "1"
    assert found["HostConfig"]["Memory"] == memory
    assert found["HostConfig"]["ReadonlyRootfs"]
    for place in ("/", "/opt", "/etc"):
        assert podman.run("podman", "exec", container, "touch", f"{place}/written").returncode != 0
    assert "PASSWORD" not in json.dumps(found["Config"]["Env"])


def check_broker_refuses(podman: Podman) -> None:
    """Clients without TLS, without our authority, without a key, or with another service's key for our subjects."""
    script = "from dynamix.cli.main import main; raise SystemExit(main(['doctor', '--alive', 'reward']))"

    def alive(**changes: str) -> bool:
        environ = [f"--env={name}={value}" for name, value in changes.items()]
        return podman.run("podman", "exec", *environ, "dynamix_reward_1", "python", "-c", script).returncode == 0

    assert not alive(DYNAMIX_NATS_URL="nats://nats:4222", DYNAMIX_NATS_CA_FILE="")
    assert not alive(DYNAMIX_NATS_CA_FILE="/etc/ssl/certs/none.pem")
    assert not alive(DYNAMIX_NATS_CREDS_FILE="")


def start_job(podman: Podman, directory: Path) -> Path:
    """Two ranks, each in a container on a node of its own, with one key for the job; where they log."""
    secrets = podman.clone / "deploy/secrets"
    podman.keys("create", "alice", "--role", "trainer", "--job", "steady", "-o", "/etc/dynamix/alice.creds")
    podman.keys("create", OTHER_NODE, "--role", "collector", "--node", OTHER_NODE, "-o", "/etc/dynamix/node-b.creds")
    for name in ("alice", OTHER_NODE):
        os.chown(secrets / f"{name}.creds", 10001, 10001)
    logs = directory / "logs"
    logs.mkdir()
    os.chown(logs, 10001, 10001)

    def start(name: str, node: str, key: str, memory: str, image: str, *words: str) -> None:
        files = [f"--volume={secrets}/ca.pem:/run/ca.pem:ro", f"--volume={secrets}/{key}.creds:/run/key.creds:ro"]
        bus = {"URL": "tls://nats:4222", "CA_FILE": "/run/ca.pem", "CREDS_FILE": "/run/key.creds"}
        environ = [f"--env=DYNAMIX_NATS_{what}={value}" for what, value in bus.items()]
        environ += [f"--env=DYNAMIX_NODE={node}", "--env=OMP_NUM_THREADS=1"]
        place = ["--network", NETWORK, "--name", name, "--hostname", name, "--memory", memory]
        podman("run", "--detach", *place, *CLOSED, *files, *environ, *words[:-1], image, *words[-1].split())

    start("collector-b", OTHER_NODE, OTHER_NODE, "1g", "dynamix-collector:0.1.0", "--pid=host", "")
    script = podman.clone / "tests/support/steady_job.py"
    mounts = [f"--volume={script}:/workspace/train.py:ro", f"--volume={logs}:/workspace/logs"]
    meeting = "--rdzv-id steady-0a1b2c3d --rdzv-backend c10d --rdzv-endpoint rank-0:29400"
    for number, node in enumerate((NODE, OTHER_NODE)):
        host = f"--rdzv-conf is_host={1 - number},join_timeout=300"
        line = f"--job steady-0a1b2c3d -- --nnodes 2 --nproc-per-node 1 {meeting} {host} train.py logs 1000"
        start(f"rank-{number}", node, "alice", "2g", "dynamix-train:0.1.0", *mounts, line)
    return logs


def check_pods(podman: Podman, directory: Path, goes_on: Callable[[], None]) -> None:
    """The Kubernetes Deployments, as pods of podman, take over from the services of compose."""
    secrets = podman.clone / "deploy/secrets"
    done = podman.compose("stop", "reward", "arbitrator")
    assert done.returncode == 0, done.stderr
    podman("network", "disconnect", NETWORK, "dynamix_nats_1")
    podman("network", "connect", "--alias", HOST, "--alias", "nats", NETWORK, "dynamix_nats_1")
    (kustomization,) = documents("base/kustomization.yaml")
    (variables,) = kustomization["configMapGenerator"]
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": variables["name"]},
        "data": dict(line.split("=", 1) for line in variables["literals"]),
    }
    written = directory / "pods"
    for made in kustomization["secretGenerator"]:
        (written / made["name"]).mkdir(parents=True)
        for key, _, file in (one.partition("=") for one in made["files"]):
            copy = shutil.copy(secrets / Path(file).relative_to("secrets"), written / made["name"] / key)
            os.chown(copy, 10001, 10001)
    (directory / "environment.yaml").write_text(yaml.safe_dump(config_map))
    for number, name in enumerate(("reward", "arbitrator")):
        manifest = find(base(), "Deployment", f"dynamix-{name}")
        manifest["spec"]["replicas"] = 1  # podman 4 names all containers of a Deployment alike
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        container["ports"][0]["hostPort"] = 19601 + number  # else podman 4 publishes each at its own port
        for volume in manifest["spec"]["template"]["spec"]["volumes"]:
            if secret := volume.pop("secret", None):  # podman 4 knows no volumes of secrets
                volume["hostPath"] = {"path": str(written / secret["secretName"]), "type": "Directory"}
        file = directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump(manifest))
        podman("play", "kube", "--network", NETWORK, "--configmap", str(directory / "environment.yaml"), str(file))
    containers = {name: f"dynamix-{name}-pod-0-{name}" for name in ("reward", "arbitrator")}
    ready = "from urllib.request import urlopen; urlopen('http://127.0.0.1:9601/readyz', timeout=10)"
    for name, named in containers.items():
        wait(partial(podman.succeeds, "exec", named, "python3", "-c", ready), f"pod {name} is ready")
        check_closed(podman, named, 1 << 30)
    goes_on()
    for name in containers:
        podman("play", "kube", "--down", str(directory / f"{name}.yaml"))
    assert podman.compose("start", "reward", "arbitrator").returncode == 0
