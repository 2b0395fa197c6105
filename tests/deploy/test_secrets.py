"""make-secrets.sh: one password per user of the broker, closed to others, never written twice."""

import re
from pathlib import Path

import pytest
from tests.support.deployed_broker import DEPLOY, make_secrets

from dynamix.runtime.bus.users.users_file import read_users


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make_secrets(tmp_path / "secrets")
    return tmp_path / "secrets"


def users_of_the_broker() -> set[str]:
    return {user.name for user in read_users((DEPLOY / "users" / "users.conf").read_text()) if not user.keys}


def test_every_user_of_the_broker_has_a_password_and_the_broker_knows_it(secrets: Path) -> None:
    files = {file.stem: file.read_text().strip() for file in secrets.glob("*.password")}
    assert set(files) == users_of_the_broker()
    assert make_secrets(secrets) == {f"NATS_PASSWORD_{user.upper()}": text for user, text in files.items()}


def test_the_broker_reads_exactly_these_variables(secrets: Path) -> None:
    files = (DEPLOY / "nats.conf", DEPLOY / "users" / "users.conf")
    used = {name for file in files for name in re.findall(r"\$(NATS_\w+)", file.read_text())}
    assert used == set(make_secrets(secrets))


def test_passwords_are_long_different_and_no_number(secrets: Path) -> None:
    passwords = list(make_secrets(secrets).values())
    assert len(set(passwords)) == len(passwords)
    assert all(re.fullmatch(r"p[0-9a-f]{48}", password) for password in passwords)


def test_the_directory_is_closed_to_others(secrets: Path) -> None:
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert (secrets / "nats.env").stat().st_mode & 0o777 == 0o600


def test_a_second_run_changes_nothing_and_recreates_a_deleted_password(secrets: Path) -> None:
    before = make_secrets(secrets)
    assert make_secrets(secrets) == before
    (secrets / "reward.password").unlink()
    after = make_secrets(secrets)
    assert {key for key in before if before[key] != after[key]} == {"NATS_PASSWORD_REWARD"}


def test_git_never_sees_the_secrets() -> None:
    assert "secrets/" in (DEPLOY / ".gitignore").read_text().splitlines()
