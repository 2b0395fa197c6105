"""TLS and certificates of clients on the deployed broker: who connects, who is refused, and with which fix."""

import shutil
import ssl
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.support.deployed_broker import DeployedBroker, certificate, deployed_broker

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, connection
from dynamix.runtime.settings import BusSettings, check_bus, tls_context

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is missing: no certificate can be made, TLS is not tested here"
)


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


def environ_of(certificate: Path) -> dict[str, str]:
    return {"NATS_TLS_CERTIFICATE": str(certificate), "NATS_TLS_KEY": str(certificate.with_suffix(".key"))}


def settings(broker: DeployedBroker, ca_file: Path, host: str = "localhost") -> BusSettings:
    url = f"tls://{host}:{broker.url.rpartition(':')[2]}"
    return msgspec.structs.replace(broker.settings("watcher"), url=url, ca_file=str(ca_file))


def with_certificate(settings: BusSettings, certificate: Path) -> BusSettings:
    files = {"certificate_file": str(certificate), "certificate_key_file": str(certificate.with_suffix(".key"))}
    return msgspec.structs.replace(settings, **files)


async def connect(settings: BusSettings) -> str:
    """Connect and close; returns the version of TLS."""
    bus = await Bus.connect(settings, name="test-1", wait=False)
    socket = bus._connection._client._transport._io_writer.get_extra_info("ssl_object")
    await bus.close()
    return str(socket.version())


async def test_a_client_checks_the_authority_and_the_name_of_the_broker(tmp_path: Path) -> None:
    own = certificate(tmp_path, "localhost")
    with deployed_broker(tmp_path, environ=environ_of(own)) as broker:
        assert await connect(settings(broker, own)) == "TLSv1.3"
        with pytest.raises(BusError, match="DYNAMIX_NATS_CA_FILE"):
            await connect(settings(broker, certificate(tmp_path, "other")))
        with pytest.raises(BusError, match=r"name the broker in DYNAMIX_NATS_URL as its certificate does"):
            await connect(settings(broker, own, host="127.0.0.1"))


async def test_an_expired_certificate_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = signed_certificate(tmp_path, "localhost", certificate(tmp_path, "authority"), days=-1)
    with (
        deployed_broker(tmp_path, environ=environ_of(path)) as broker,
        pytest.raises(BusError, match=r"has expired\): look at the clocks of both machines"),
    ):
        await connect(settings(broker, tmp_path / "authority.pem"))


async def test_a_broker_that_demands_certificates_takes_those_of_its_authority_and_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = certificate(tmp_path, "authority")
    for name in ("localhost", "client"):
        signed_certificate(tmp_path, name, authority)

    def demand_certificates(directory: Path) -> None:
        file = directory / "nats.conf"
        file.write_text(file.read_text().replace("# ca_file:", "ca_file:").replace("# verify:", "verify:"))

    def older(settings: BusSettings) -> ssl.SSLContext | None:
        context = tls_context(settings)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    environ = environ_of(tmp_path / "localhost.pem") | {"NATS_TLS_CA": str(authority)}
    with deployed_broker(tmp_path, environ=environ, prepare=demand_certificates) as broker:
        without = settings(broker, authority)
        ours = with_certificate(without, tmp_path / "client.pem")
        assert await connect(ours) == "TLSv1.3"
        for refused in (without, with_certificate(without, certificate(tmp_path, "mallory"))):
            with pytest.raises(BusError):
                await connect(refused)
        with pytest.raises(PermissionDeniedError):  # a certificate does not replace the credential
            await connect(msgspec.structs.replace(ours, creds_file="", password="pwrong"))
        monkeypatch.setattr(connection, "tls_context", older)
        with pytest.raises(BusError, match=r"(?i)protocol version"):
            await connect(ours)


def test_a_certificate_without_its_own_readable_key_is_refused_before_anything_connects(tmp_path: Path) -> None:
    one, other = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    plain, locked = one.with_suffix(".key"), tmp_path / "locked.key"
    command = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", str(plain), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    for key, sentence in ((other.with_suffix(".key"), "they do not fit"), (locked, "without a pass phrase")):
        with pytest.raises(ValueError, match=sentence):
            check_bus(BusSettings(certificate_file=str(one), certificate_key_file=str(key)))
