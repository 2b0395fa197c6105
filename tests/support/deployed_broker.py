"""The real nats-server with deploy/nats.conf as it is, on free ports and with passwords from make-secrets.sh."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamix.cli.main import main
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.kinds import SERVICES, WATCHER

DEPLOY = Path(__file__).parents[2] / "deploy"
STORE = "/var/lib/dynamix-nats"
START_TIMEOUT_S = 15.0
USERS = (*SERVICES, "provision", WATCHER)
"""All in deploy/users/users.conf."""


class DeployedBroker:
    """How to reach the broker, as each of its users."""

    def __init__(self, url: str, monitor: str, directory: Path, pid: int) -> None:
        self.url = url
        self.monitor = monitor
        self.directory = directory
        self.users_file = directory / "users" / "users.conf"
        self.log = directory / "log"
        self.pid = pid

    def settings(self, user: str) -> BusSettings:
        return BusSettings(url=self.url, user=user, password_file=str(self.password_file(user)))

    def password_file(self, user: str) -> Path:
        return self.directory / "secrets" / f"{user}.password"

    def key(self, *words: str) -> BusSettings:
        """A new user with a key, made by `dynamix keys create`; the broker does not know it before `reload`."""
        settings = self.with_key(words[0])
        self.keys("create", *words, "-o", settings.nkey_file)
        return settings

    def with_key(self, name: str) -> BusSettings:
        """How to connect as a user whose key was made before."""
        return BusSettings(url=self.url, nkey_file=str(self.directory / f"{name}.nkey"))

    def keys(self, *words: str) -> None:
        """Run `dynamix keys` on this broker's users."""
        assert main(["keys", *words, "--users", str(self.users_file)]) == 0

    def reload(self) -> None:
        """Let the running server read its configuration again, and wait until it has."""
        before = self.varz()["config_load_time"]
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.varz()["config_load_time"] == before:
            assert time.monotonic() < deadline, f"nats-server did not reload: {self.log.read_text()[-2000:]}"
            time.sleep(0.01)

    def varz(self) -> dict[str, Any]:
        """What the server says of itself."""
        with urllib.request.urlopen(f"{self.monitor}/varz", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def make_secrets(directory: Path) -> dict[str, str]:
    """Run make-secrets.sh; returns the broker's variables."""
    subprocess.run(["sh", str(DEPLOY / "make-secrets.sh"), str(directory)], check=True)
    pairs = (line.partition("=") for line in (directory / "nats.env").read_text().splitlines())
    return {key: value for key, _, value in pairs}


@contextlib.contextmanager
def deployed_broker(
    directory: Path,
    *,
    config: str = "nats.conf",
    environ: Mapping[str, str] | None = None,
    prepare: Callable[[Path], None] = lambda _directory: None,
) -> Iterator[DeployedBroker]:
    """Run the broker; only the place of its store is changed, which root alone could write, and what `prepare` does."""
    whole = {**os.environ, **make_secrets(directory / "secrets"), **(environ or {})}
    (directory / "users").mkdir()
    for file in (*DEPLOY.glob("*.conf"), *DEPLOY.glob("users/*.conf")):
        text = file.read_text().replace(STORE, str(directory / "store"))
        (directory / file.relative_to(DEPLOY)).write_text(text)
    prepare(directory)
    log = directory / "log"
    ports = ["-p", "-1", "-m", "-1", "--ports_file_dir", str(directory), "-l", str(log)]
    with subprocess.Popen([str(server_binary()), "-c", str(directory / config), *ports], env=whole) as process:
        try:
            found = _wait_for_ports(directory, process, log)
            yield DeployedBroker(found["nats"][0], found["monitoring"][0], directory, process.pid)
        finally:
            process.terminate()


def become(monkeypatch: pytest.MonkeyPatch, broker: DeployedBroker, user: str) -> None:
    """Let the environment be that of a user of the broker."""
    monkeypatch.setenv("DYNAMIX_NATS_URL", broker.url)
    monkeypatch.setenv("DYNAMIX_NATS_USER", user)
    monkeypatch.setenv("DYNAMIX_NATS_PASSWORD_FILE", str(broker.password_file(user)))


def _wait_for_ports(directory: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, list[str]]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, StopIteration):
            found: dict[str, list[str]] = json.loads(next(directory.glob("*.ports")).read_text())
            return found
        time.sleep(0.01)
    raise AssertionError(f"nats-server did not start: {log.read_text() if log.exists() else 'no log'}")
