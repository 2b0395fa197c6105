"""nats.conf: TLS 1.3, and with two of its lines certificates of clients, too."""

import asyncio
import gc
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.brokers import until
from tests.support.deployed_broker import DeployedBroker, deployed_broker

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, connection
from dynamix.runtime.settings import BusSettings, check_bus, tls_context

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


def environ_of(certificate: Path) -> dict[str, str]:
    return {"NATS_TLS_CERTIFICATE": str(certificate), "NATS_TLS_KEY": str(certificate.with_suffix(".key"))}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DeployedBroker]:
    with deployed_broker(tmp_path, environ=environ_of(certificate(tmp_path, "localhost"))) as running:
        yield running


def settings(broker: DeployedBroker, scheme: str, ca_file: Path, host: str = "localhost") -> BusSettings:
    port = broker.url.rpartition(":")[2]
    url = f"{scheme}://{host}:{port}"
    return msgspec.structs.replace(broker.settings("watcher"), url=url, ca_file=str(ca_file))


async def test_a_client_with_the_ca_certificate_connects(broker: DeployedBroker, tmp_path: Path) -> None:
    bus = await Bus.connect(settings(broker, "tls", tmp_path / "localhost.pem"), name="test-1", wait=False)
    assert bus.is_connected
    await bus.close()


async def test_a_certificate_of_another_authority_is_refused_and_nothing_else_is_printed(
    broker: DeployedBroker, tmp_path: Path
) -> None:
    other = certificate(tmp_path, "other")
    with pytest.raises(BusError, match="of the authority that signed it in DYNAMIX_NATS_CA_FILE") as refused:
        await Bus.connect(settings(broker, "tls", other), name="test-1", wait=False)
    assert "[SSL" not in str(refused.value)
    # by type, for torch has an object that warns of itself where isinstance asks it for its class
    futures = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Future) and each.done()]
    unheard = [future for future in futures if future._log_traceback]  # asyncio prints each when it is collected
    assert unheard == []


async def test_a_broker_of_another_name_than_its_certificates_is_refused_with_the_fix(
    broker: DeployedBroker, tmp_path: Path
) -> None:
    by_address = settings(broker, "tls", tmp_path / "localhost.pem", host="127.0.0.1")
    with pytest.raises(BusError, match=r"127\.0\.0\.1'\): name the broker in DYNAMIX_NATS_URL as its certificate does"):
        await Bus.connect(by_address, name="test-1", wait=False)


async def test_an_expired_certificate_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = signed_certificate(tmp_path, "localhost", certificate(tmp_path, "authority"), days=-1)
    with (
        deployed_broker(tmp_path, environ=environ_of(path)) as broker,
        pytest.raises(BusError, match=r"has expired\): look at the clocks of both machines, or give the broker"),
    ):
        await Bus.connect(settings(broker, "tls", tmp_path / "authority.pem"), name="test-1")


async def test_a_connection_that_ends_is_no_warning_of_asyncio(
    broker: DeployedBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await Bus.connect(settings(broker, "tls", tmp_path / "localhost.pem"), name="test-1", wait=False)
    reader = bus._connection._client._transport._io_reader
    await bus.close()
    await until(reader.at_eof)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """An authority's certificate, and of its making a server's (`localhost`) and a client's (`client`)."""
    path = certificate(tmp_path, "authority")
    for name in ("localhost", "client"):
        signed_certificate(tmp_path, name, path)
    return path


@pytest.fixture
def mutual(tmp_path: Path, authority: Path) -> Iterator[DeployedBroker]:
    environ = environ_of(tmp_path / "localhost.pem") | {"NATS_TLS_CA": str(authority)}
    with deployed_broker(tmp_path, environ=environ, prepare=demand_certificates) as running:
        yield running


def demand_certificates(directory: Path) -> None:
    file = directory / "nats.conf"
    file.write_text(file.read_text().replace("# ca_file:", "ca_file:").replace("# verify:", "verify:"))


def signed_certificate(directory: Path, name: str, authority: Path, *, days: int = 2) -> Path:
    """A certificate that the authority signed, and its key beside it."""
    path = directory / f"{name}.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    request = ["openssl", "req", *curve, "-keyout", str(path.with_suffix(".key")), "-subj", f"/CN={name}"]
    names = ["-addext", f"subjectAltName=DNS:{name}"]
    asked = subprocess.run([*request, *names], check=True, capture_output=True).stdout
    keys = ["-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")), "-CAcreateserial"]
    sign = ["openssl", "x509", "-req", "-days", str(days), "-copy_extensions", "copy", *keys, "-out", str(path)]
    subprocess.run(sign, input=asked, check=True, capture_output=True)
    return path


def with_certificate(settings: BusSettings, certificate: Path) -> BusSettings:
    files = {"certificate_file": str(certificate), "certificate_key_file": str(certificate.with_suffix(".key"))}
    return msgspec.structs.replace(settings, **files)


async def test_a_client_with_a_certificate_of_the_authority_connects_by_tls_1_3(
    mutual: DeployedBroker, authority: Path, tmp_path: Path
) -> None:
    ours = with_certificate(settings(mutual, "tls", authority), tmp_path / "client.pem")
    bus = await Bus.connect(ours, name="test-1", wait=False)
    socket = bus._connection._client._transport._io_writer.get_extra_info("ssl_object")
    assert socket.version() == "TLSv1.3"
    await bus.close()


async def test_a_certificate_does_not_replace_the_credential(
    mutual: DeployedBroker, authority: Path, tmp_path: Path
) -> None:
    ours = with_certificate(settings(mutual, "tls", authority), tmp_path / "client.pem")
    with pytest.raises(PermissionDeniedError):
        await Bus.connect(msgspec.structs.replace(ours, creds_file="", password="pwrong"), name="test-1", wait=False)


async def test_a_broker_without_a_certificate_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not start"), deployed_broker(tmp_path, environ={}):
        pass


async def test_a_client_without_a_certificate_of_the_authority_is_refused(
    mutual: DeployedBroker, authority: Path, tmp_path: Path
) -> None:
    without = settings(mutual, "tls", authority)
    for ours in (without, with_certificate(without, certificate(tmp_path, "mallory"))):
        with pytest.raises(BusError):
            await Bus.connect(ours, name="test-1", wait=False)


async def test_tls_1_2_is_refused(
    mutual: DeployedBroker, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = with_certificate(settings(mutual, "tls", authority), tmp_path / "client.pem")

    def older(settings: BusSettings) -> ssl.SSLContext | None:
        context = tls_context(settings)
        assert context is not None
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    monkeypatch.setattr(connection, "tls_context", older)
    with pytest.raises(BusError, match=r"(?i)protocol version"):
        await Bus.connect(ours, name="test-1", wait=False)


def test_a_certificate_that_does_not_fit_its_key_is_said_before_anything_connects(tmp_path: Path) -> None:
    one, other = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    both = BusSettings(certificate_file=str(one), certificate_key_file=str(other.with_suffix(".key")))
    with pytest.raises(ValueError, match="they do not fit; name a certificate and its key"):
        check_bus(both)


def test_a_key_with_a_pass_phrase_is_refused_and_asks_no_terminal(tmp_path: Path) -> None:
    path = certificate(tmp_path, "one")
    plain, locked = path.with_suffix(".key"), tmp_path / "locked.key"
    command = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", str(plain), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="without a pass phrase"):
        check_bus(BusSettings(certificate_file=str(path), certificate_key_file=str(locked)))
