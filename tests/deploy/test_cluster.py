"""nats-cluster.conf and make-cluster.sh: three real servers, every stream three times; strangers stay outside."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support import examples
from tests.support.brokers import connected, until
from tests.support.deployed_broker import DEPLOY, STORE, certificate, make_authority, wait_for_ports
from tests.support.reading import read
from tests.support.server_cluster import free_ports

from dynamix.cli.main import main
from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus, PermissionDeniedError
from dynamix.runtime.embedded import server_binary
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import REPORTS

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is MISSING: no certificate can be made, the cluster is NOT checked"
)

LISTEN = '"0.0.0.0:6222"'


class Deployment:
    """Certificates, keys and the three files of variables; servers are started one by one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._secrets = directory / "secrets"
        self._ports = free_ports(3)
        self._certificate = certificate(directory, "localhost")
        make_authority(directory)
        addresses = [f"localhost:{port}" for port in self._ports]
        self.said = make_cluster(self._secrets, *addresses).stdout
        self.urls: dict[int, str] = {}

    def settings(self, user: str) -> BusSettings:
        return BusSettings(
            url=",".join(self.urls.values()),
            creds_file=str(self._directory / "credentials" / f"{user}.creds"),
            ca_file=str(self._certificate),
        )

    def command(self, *words: str) -> None:
        """Run a command of an operator, which talks to one of the servers."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in bus_environment(self.settings("provision")).items():
                patch.setenv(name, value)
            assert main([*words]) == 0

    def keys(self, *words: str) -> None:
        self.command("keys", *words, "--authority", str(self._directory / "authority" / "authority.json"))

    def log(self, number: int) -> str:
        return (self._directory / str(number) / "log").read_text()

    @contextlib.contextmanager
    def server(self, number: int, **changes: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run server 1, 2 or 3 with what make-cluster.sh wrote for it."""
        home = self._directory / str(number)
        home.mkdir()
        shutil.copy(self._directory / "accounts.conf", home)
        for file in DEPLOY.glob("*.conf"):
            text = file.read_text().replace(STORE, str(home / "store"))
            (home / file.name).write_text(text.replace(LISTEN, f'"127.0.0.1:{self._ports[number - 1]}"'))
        tls = {"CERTIFICATE": self._certificate, "KEY": self._certificate.with_suffix(".key"), "CA": self._certificate}
        environ = {**os.environ, **variables_of(self._secrets / f"cluster-{number}.env")}
        environ |= {f"NATS_TLS_{name}": str(path) for name, path in tls.items()} | changes
        options = ["-p", "-1", "-m", "-1", "--ports_file_dir", str(home), "-l", str(home / "log"), "-a", "127.0.0.1"]
        command = [str(server_binary()), "-c", str(home / "nats-cluster.conf"), *options]
        with subprocess.Popen(command, env=environ) as process:
            try:
                port = wait_for_ports(home, process, home / "log")["nats"][0].rpartition(":")[2]
                self.urls[number] = f"tls://localhost:{port}"
                yield process
            finally:
                process.kill()


def make_cluster(directory: Path, *servers: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(DEPLOY / "make-cluster.sh"), str(directory), *servers]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def variables_of(file: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in file.read_text().splitlines())
    return {key: value for key, _, value in pairs}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_servers_keep_acknowledged_messages_and_revoke_keys_with_one_of_them_killed(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with contextlib.ExitStack() as running:
        processes = [running.enter_context(deployment.server(number)) for number in (1, 2, 3)]
        await asyncio.to_thread(deployment.command, "provision", "--replicas", "3")
        await asyncio.to_thread(deployment.keys, "refresh")
        name = subjects.name_and_run(examples.JOB)[0]
        alice = deployment.settings("alice")
        create = f"create alice --role trainer --job {name} -o".split()
        await asyncio.to_thread(deployment.keys, *create, alice.creds_file)
        async with contextlib.AsyncExitStack() as stack:
            closed: list[str] = []
            for number in (2, 3):
                own = msgspec.structs.replace(alice, url=deployment.urls[number])
                await stack.enter_async_context(connected(own, "trainer-1", on_closed=closed.append))
            bus = await stack.enter_async_context(connected(deployment.settings("trainer"), "trainer-2"))
            sequences = [await bus.publish(examples.report(window=window)) for window in range(20)]
            processes[0].kill()
            processes[0].wait()
            del deployment.urls[1]
            sequences += [await bus.publish(examples.report(window=window)) for window in range(20, 40)]
            assert sequences == list(range(1, 41))
            await asyncio.to_thread(deployment.keys, "revoke", "alice")  # tells one server
            await until(lambda: len(closed) == 2)
        for url in deployment.urls.values():
            with pytest.raises(PermissionDeniedError):
                await Bus.connect(msgspec.structs.replace(alice, url=url), name="trainer-1")
        async with connected(deployment.settings("collector-node-a"), "collector-1") as reader:
            wanted = [subjects.of("report", subjects.ANY, "node-a")]
            async with reader.consume(REPORTS.name, wanted, start="all", durable="collector-node-a") as consumer:
                assert [message.sequence for message in await read(consumer, 40)] == sequences


async def test_a_server_with_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    (tmp_path / "other").mkdir()
    other = certificate(tmp_path / "other", "localhost")
    changed = {"CERTIFICATE": other, "KEY": other.with_suffix(".key")}
    with deployment.server(1), deployment.server(2, **{f"NATS_TLS_{key}": str(file) for key, file in changed.items()}):
        await until(lambda: "tls handshake failure" in deployment.log(1).lower())


def test_the_files_of_the_three_differ_in_their_name_only(tmp_path: Path) -> None:
    said = make_cluster(tmp_path, "a.example", "b.example:7000", "10.0.0.3").stdout
    assert said == (
        "for every service and job: DYNAMIX_NATS_URL=tls://a.example:4222,tls://b.example:4222,tls://10.0.0.3:4222\n"
    )
    found = [variables_of(tmp_path / f"cluster-{number}.env") for number in (1, 2, 3)]
    assert [one.pop("NATS_SERVER_NAME") for one in found] == ["dynamix-1", "dynamix-2", "dynamix-3"]
    assert found[0] == found[1] == found[2]
    hosts = [found[0][f"NATS_ROUTE_{number}"].removeprefix("nats-route://") for number in (1, 2, 3)]
    assert hosts == ["a.example:6222", "b.example:7000", "10.0.0.3:6222"]
    assert make_cluster(tmp_path / "other", "a", "b").returncode == 2
    assert not list(tmp_path.glob("other/*.env"))
