"""nats-tls.conf: the same broker for several machines; who does not check its certificate does not get in."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.deployed_broker import DeployedBroker, deployed_broker

from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.settings import BusSettings

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is MISSING: no certificate can be made, TLS is NOT checked here"
)


def certificate(directory: Path, name: str) -> Path:
    """A self-signed certificate for `name`, and its key beside it."""
    path = directory / f"{name}.pem"
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run(["openssl", "req", "-x509", *curve, *files, *names], check=True, capture_output=True)
    return path


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DeployedBroker]:
    path = certificate(tmp_path, "localhost")
    environ = {"NATS_TLS_CERTIFICATE": str(path), "NATS_TLS_KEY": str(path.with_suffix(".key"))}
    with deployed_broker(tmp_path, config="nats-tls.conf", environ=environ) as running:
        yield running


def settings(broker: DeployedBroker, scheme: str, ca_file: Path) -> BusSettings:
    port = broker.url.rpartition(":")[2]
    url = f"{scheme}://localhost:{port}"
    return msgspec.structs.replace(broker.settings("watcher"), url=url, ca_file=str(ca_file))


async def test_a_client_with_the_ca_certificate_connects(broker: DeployedBroker, tmp_path: Path) -> None:
    bus = await Bus.connect(settings(broker, "tls", tmp_path / "localhost.pem"), name="test-1", wait=False)
    assert bus.is_connected
    await bus.close()


async def test_a_certificate_of_another_authority_is_refused(broker: DeployedBroker, tmp_path: Path) -> None:
    other = certificate(tmp_path, "other")
    with pytest.raises(BusError, match="certificate"):
        await Bus.connect(settings(broker, "tls", other), name="test-1", wait=False)
