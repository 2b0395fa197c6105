"""The broker as deploy/ configures it, one server or three, with a key for each user, and the services on it."""

import contextlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.failover.servers import free_ports, until_current
from bench.floods.senders import ALL_JOBS, MADE_UP_JOBS
from bench.harness.command import BenchmarkError
from bench.harness.steady_job import NODE, running_services

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.authority import PROVISION, Authority
from dynamix.runtime.bus.provision import make_durable, provision
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.kinds import WATCHER
from dynamix.schemas.subjects import name_and_run

DEPLOY = Path(__file__).parents[2] / "deploy"
STORE, NAME, SYNC = "/var/lib/dynamix-nats", "server_name: dynamix\n", "sync_interval: 200ms"
START_TIMEOUT_S = 20.0


class User(NamedTuple):
    """Who gets a key."""

    name: str
    role: str
    limits: tuple[str, ...] = ()
    """Names of jobs, or a node, or an instance."""


class Deployment:
    """How to reach the broker, as each of its users.

    Attributes:
        watcher: connected as the user who may read everything.
        metrics_port: of the arbitrator, on this machine.
    """

    def __init__(self, urls: Sequence[str], directory: Path, logs: Sequence[Path]) -> None:
        self._url = ",".join(urls)
        self._directory = directory
        self._logs = logs
        self.metrics_port = free_ports(1)[0]
        self.watcher: Bus

    def num_violations(self) -> int:
        """Operations that the broker refused so far, as its log has them."""
        found = 0
        for log in self._logs:
            with log.open("rb") as lines:
                found += sum(b"Violation" in line for line in lines)
        return found

    def settings(self, name: str) -> BusSettings:
        """How to connect as a user."""
        return BusSettings(url=self._url, creds_file=str(self._directory / f"{name}.creds"))


@contextlib.asynccontextmanager
async def deployment(jobs: Sequence[str], num_servers: int, others: Sequence[User] = ()) -> AsyncIterator[Deployment]:
    """Broker and services, ready; for each job a trainer of its name, which may speak of no other, and one for all."""
    services = [
        *(User(role, role) for role in ("arbitrator", PROVISION, WATCHER)),
        User("reward", "reward", (NODE,)),
        User("collector", "collector", (NODE,)),
    ]
    names = [name_and_run(job)[0] for job in jobs]
    trainers = [User(job, "trainer", (name,)) for job, name in zip(jobs, names, strict=True)]
    users = [*services, *trainers, User(ALL_JOBS, "trainer", (*set(names), *MADE_UP_JOBS)), *others]
    authority = Authority.new()
    with (
        tempfile.TemporaryDirectory(prefix="dynamix-floods-") as name,
        _broker(Path(name), authority, users, num_servers) as running,
    ):
        async with _bus(running, PROVISION) as operator:
            await provision(operator, num_replicas=num_servers)
            for key in authority.keys:
                if key.durable is not None:
                    await make_durable(operator.requests, key.durable, key.filter)
            if num_servers > 1:
                await until_current(operator)
        async with (
            _bus(running, WATCHER) as running.watcher,
            running_services(running.settings, running.watcher, metrics_port=running.metrics_port),
        ):
            yield running


@contextlib.asynccontextmanager
async def _bus(running: Deployment, name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(running.settings(name), name=f"{name}-1")
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.contextmanager
def _broker(directory: Path, authority: Authority, users: Sequence[User], num_servers: int) -> Iterator[Deployment]:
    """Servers that keep every stream on all of them, as on Kubernetes where they are three."""
    text = (DEPLOY / "nats.conf").read_text()
    for part in (STORE, NAME, SYNC):
        assert part in text, f"deploy/nats.conf has no {part!r}"
    text = re.sub(r"^(tls \{.*?^\}|log_file.*?)\n", "", text, flags=re.MULTILINE | re.DOTALL)
    for user in users:
        file = directory / f"{user.name}.creds"
        file.touch(mode=0o600)
        file.write_text(authority.issue(user.name, user.role, user.limits, days=1).text())
    routes = free_ports(num_servers) if num_servers > 1 else []
    with contextlib.ExitStack() as running:
        started = []
        for number in range(num_servers):
            own = directory / f"server-{number}"
            own.mkdir()
            (own / "accounts.conf").write_text(authority.accounts_conf())
            config = text.replace(STORE, str(own / "store"))
            if routes:
                config = config.replace(NAME, f"server_name: dynamix-{number}\n").replace(SYNC, "sync_interval: always")
                config += _cluster(routes, number)
            (own / "nats.conf").write_text(config)
            log = own / "nats.log"
            ports = ["-p", "-1", "-m", "-1", "--ports_file_dir", str(own), "-l", str(log)]
            process = running.enter_context(
                subprocess.Popen([str(server_binary()), "-c", str(own / "nats.conf"), *ports])
            )
            running.callback(process.terminate)
            started.append((own, process, log))
        yield Deployment([_address(*server) for server in started], directory, [log for _, _, log in started])


def _cluster(routes: Sequence[int], own: int) -> str:
    others = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
    return f'cluster {{ name: dynamix, listen: "127.0.0.1:{routes[own]}", no_advertise: true, routes: [{others}] }}\n'


def _address(directory: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """From the file that the server writes once it listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, StopIteration):
            address: str = json.loads(next(directory.glob("*.ports")).read_text())["nats"][0]
            return address
        time.sleep(0.01)
    raise BenchmarkError(f"nats-server did not start: {log.read_text() if log.exists() else 'it wrote no log'}")
