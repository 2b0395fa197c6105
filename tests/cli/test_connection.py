"""How commands find the broker: environment first, then the file of `dynamix up`, then the default."""

import contextlib
from pathlib import Path

import msgspec
import pytest

from dynamix.cli import connection
from dynamix.cli.errors import CommandError
from dynamix.cli.services import ServiceProcess, bus_environment
from dynamix.runtime.settings import BusSettings

BROKER = BusSettings(url="nats://127.0.0.1:4999", user="dynamix", password="secret-123")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path / "home")}


def test_a_running_up_is_found_by_a_file_for_its_user_only(environ: dict[str, str]) -> None:
    with connection.published(BROKER, environ) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert connection.find(environ) == connection.find({**environ, "DYNAMIX_NATS_URL": ""}) == BROKER
        found = connection.find({**environ, "DYNAMIX_NATS_URL": "nats://127.0.0.1:5000"})
        assert (found.url, found.password) == ("nats://127.0.0.1:5000", ""), "the environment counts more"
    assert connection.find(environ) == BusSettings()


def test_a_file_that_others_may_read_or_that_is_not_ours_is_refused(environ: dict[str, str]) -> None:
    with connection.published(BROKER, environ) as file:
        file.chmod(0o644)
        with pytest.raises(CommandError, match="is open to other users"):
            connection.find(environ)
        file.chmod(0o600)
        file.write_text("{")
        with pytest.raises(CommandError, match="remove it"):
            connection.find(environ)


def test_a_misspelt_variable_is_a_usage_error_that_names_the_right_one(environ: dict[str, str]) -> None:
    with pytest.raises(CommandError, match="DYNAMIX_NATS_URL") as caught:
        connection.find({**environ, "DYNAMIX_NATS_ULR": "nats://x"})
    assert caught.value.exit_code == 2


def test_without_a_runtime_directory_it_lies_in_the_cache(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    with connection.published(BROKER, environ) as file:
        assert file == tmp_path / ".cache" / "dynamix" / "connection.json"
        assert connection.find(environ) == BROKER


def test_the_file_of_a_process_that_is_gone_means_nothing(environ: dict[str, str]) -> None:
    with connection.published(BROKER, environ) as file:
        left = file.read_bytes()
    file.write_bytes(left)
    file.chmod(0o600)
    assert connection.find(environ) == BusSettings()


def test_the_file_of_a_later_up_is_left_alone(environ: dict[str, str]) -> None:
    later = msgspec.structs.replace(BROKER, url="nats://127.0.0.1:5000")
    with contextlib.ExitStack() as stack:
        with connection.published(BROKER, environ):
            stack.enter_context(connection.published(later, environ))
        assert connection.find(environ) == later


def test_services_of_a_command_know_no_other_broker_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a deployment left in the shell: they would wait for a TLS that this broker does not have."""
    for name in ("CA_FILE", "CREDS_FILE"):
        monkeypatch.setenv(f"DYNAMIX_NATS_{name}", "/etc/dynamix/left")
    monkeypatch.setenv("DYNAMIX_LOG_LEVEL", "error")
    given = ServiceProcess("reward", bus_environment(BROKER))._environ
    assert {name for name in given if name.startswith("DYNAMIX_NATS_")} == {*bus_environment(BROKER)}
    assert given["DYNAMIX_LOG_LEVEL"] == "error"
    assert ServiceProcess("reward", {})._environ["DYNAMIX_NATS_CA_FILE"] == "/etc/dynamix/left"
