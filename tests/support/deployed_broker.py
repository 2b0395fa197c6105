"""The real nats-server with deploy/nats.conf on free ports, and an authority of `dynamix keys init`."""

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dynamix.cli.main import main
from dynamix.runtime.bus.authority import ROLES
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
STORE = "/var/lib/dynamix-nats"
START_TIMEOUT_S = 60.0
NODE, INSTANCE = "node-a", "1"
USERS = ROLES
"""Each has a credential; the trainer's is for `JOBS`."""
JOBS = ("alice", "job", "mnist")


class DeployedBroker:
    """How to reach the broker, as each of its users."""

    def __init__(self, url: str, monitor: str, directory: Path, pid: int) -> None:
        self.url = url
        self.monitor = monitor
        self.directory = directory
        self.authority = directory / "authority" / "authority.json"
        self.log = directory / "log"
        self.pid = pid

    def settings(self, user: str) -> BusSettings:
        """How to connect as one of `USERS`, or one whose key was made by `key`."""
        return BusSettings(url=self.url, creds_file=str(self.credential(user)))

    def credential(self, user: str) -> Path:
        return self.directory / "credentials" / f"{f'collector-{NODE}' if user == 'collector' else user}.creds"

    def key(self, *words: str) -> BusSettings:
        """A new key, made by `dynamix keys create`."""
        settings = self.settings(words[0])
        self.keys("create", *words, "-o", settings.creds_file)
        return settings

    def keys(self, *words: str) -> int:
        """Run `dynamix keys` on this broker's authority."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DYNAMIX_NATS_URL", self.url)
            return main(["keys", *words, "--authority", str(self.authority)])

    def varz(self, page: str = "varz") -> dict[str, object]:
        """What the server's monitoring page says."""
        with urllib.request.urlopen(f"{self.monitor}/{page}", timeout=30) as answer:
            found: dict[str, object] = json.load(answer)
            return found


def make_authority(directory: Path, *words: str) -> None:
    """Run `dynamix keys init`, and make a trainer's key."""
    where = ["--authority", str(directory / "authority" / "authority.json")]
    credentials = directory / "credentials"
    assert main(["keys", "init", "--node", NODE, "--credentials", str(credentials), *where, *words]) == 0
    jobs = [word for job in JOBS for word in ("--job", job)]
    file = str(credentials / "trainer.creds")
    assert main(["keys", "create", "trainer", "--role", "trainer", *jobs, "-o", file, *where]) == 0


@contextlib.contextmanager
def deployed_broker(
    directory: Path,
    *,
    config: str = "nats.conf",
    environ: Mapping[str, str] | None = None,
    prepare: Callable[[Path], None] = lambda _directory: None,
) -> Iterator[DeployedBroker]:
    """Run the broker; changed are the place of its store, which root alone could write, what `prepare` does, and that
    it speaks without TLS where there is no `environ`."""
    make_authority(directory)
    for file in DEPLOY.glob("*.conf"):
        text = file.read_text().replace(STORE, str(directory / "store"))
        if environ is None:
            text = re.sub(r"^tls \{.*?^\}\n", "", text, flags=re.MULTILINE | re.DOTALL)
        (directory / file.name).write_text(text)
    prepare(directory)
    log = directory / "log"
    ports = ["-p", "-1", "-m", "-1", "--ports_file_dir", str(directory), "-l", str(log)]
    with subprocess.Popen(
        [str(server_binary()), "-c", str(directory / config), *ports], env={**os.environ, **(environ or {})}
    ) as process:
        try:
            found = wait_for_ports(directory, process, log)
            yield DeployedBroker(found["nats"][0], found["monitoring"][0], directory, process.pid)
        finally:
            process.terminate()


def certificate(directory: Path, name: str) -> Path:
    """A self-signed certificate for `name`, and its key beside it."""
    path = directory / f"{name}.pem"
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run(["openssl", "req", "-x509", *curve, *files, *names], check=True, capture_output=True)
    return path


def become(monkeypatch: pytest.MonkeyPatch, broker: DeployedBroker, user: str) -> None:
    """Let the environment be that of a user of the broker."""
    monkeypatch.setenv("DYNAMIX_NATS_URL", broker.url)
    monkeypatch.setenv("DYNAMIX_NATS_CREDS_FILE", str(broker.credential(user)))


def wait_for_ports(directory: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, list[str]]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, StopIteration):
            found: dict[str, list[str]] = json.loads(next(directory.glob("*.ports")).read_text())
            return found
        time.sleep(0.01)
    raise AssertionError(f"nats-server did not start: {log.read_text() if log.exists() else 'no log'}")
