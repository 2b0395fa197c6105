"""`dynamix keys`: what it writes, what it says, and what it refuses before anything is changed."""

import errno
import json
from pathlib import Path

import pytest

from dynamix.cli.main import main
from dynamix.runtime import output_files
from dynamix.runtime.bus.users.users_file import read_users
from dynamix.runtime.key_file import read_key_file

CREATE = ("create", "alice", "--role", "trainer", "--job", "alice-1")


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A file of users, in a folder of its own; keys go into the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broker" / "users.conf"
    assert main(["keys", "refresh", "--users", str(path)]) == 0
    capsys.readouterr()
    return path


def keys(users: Path, *words: str) -> int:
    return main(["keys", *words, "--users", str(users)])


def refused(users: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What it says; nothing may be changed or left."""
    before = users.read_bytes(), sorted(users.parent.parent.rglob("*"))
    assert keys(users, *words) in (1, 2)
    assert (users.read_bytes(), sorted(users.parent.parent.rglob("*"))) == before
    return capsys.readouterr().err


def test_a_key_is_written_for_its_owner_only_and_the_broker_knows_its_public_half(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(users, *CREATE, "--job", "alice-2") == 0
    file = Path("alice.nkey")
    assert file.stat().st_mode & 0o777 == 0o600
    key = read_key_file(file)
    assert (key.name, key.inbox, key.jobs) == ("alice", "alice", ("alice-1", "alice-2"))
    user = read_users(users.read_text())[-1]
    assert (user.name, user.role, user.jobs, len(user.keys)) == ("alice", "trainer", ("alice-1", "alice-2"), 1)
    said = capsys.readouterr()
    assert "alice.nkey lets in alice, jobs alice-1, alice-2: set DYNAMIX_NATS_NKEY_FILE" in said.err
    assert "systemctl reload dynamix-nats" in said.err
    assert "trainer still logs in with one password for all: `dynamix keys revoke trainer`" in said.err
    assert key.seed not in said.out + said.err + users.read_text()


def test_the_list_shows_limits_and_public_keys(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(users, *CREATE) == 0
    capsys.readouterr()
    assert keys(users, "list", "--json", "-") == 0
    listed = json.loads(capsys.readouterr().out)["users"]
    assert [user["name"] for user in listed][-2:] == ["watcher", "alice"]
    assert listed[-1]["jobs"] == ["alice-1"]
    assert keys(users, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [*["user", "role", "limited", "to", "in", "the", "account", "of", "logs", "in", "with"]]
    assert lines[1].split() == [*["trainer", "trainer", "all", "jobs", "the", "streams", "a", "password"]]
    assert lines[-1].split() == [*["alice", "trainer", "jobs", "alice-1", "its", "own"], listed[-1]["keys"][0]]


def test_a_services_consumers_have_names_that_only_its_key_and_the_broker_know(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [("node-a", "--role", "collector", "--node", "node-a"), ("reward-1", "--role", "reward", "--instance", "1")]
    endings = set()
    for name, *words in made:
        assert keys(users, "create", name, *words) == 0
        key = read_key_file(Path(f"{name}.nkey"))
        endings.add(key.consumer)
        assert keys(users, "rotate", name) == 0
        assert read_key_file(Path(f"{name}.nkey")).consumer == key.consumer
        assert len(key.consumer) == 16
        durable = f"collector-node-a-{key.consumer}" if name == "node-a" else f"reward-1-{key.consumer}"
        assert f'"dynamix.api.CONSUMER.RESET.FEED.{durable}"' in users.with_name("users-accounts.conf").read_text()
    assert len(endings) == 2
    capsys.readouterr()
    for words in (["list"], ["list", "--json", "-"]):
        assert keys(users, *words) == 0
        assert not any(ending in capsys.readouterr().out for ending in endings)


def test_a_rotation_ends_no_key_before_the_old_ones_are_revoked(
    users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(users, *CREATE) == 0
    public = [read_users(users.read_text())[-1].keys[-1]]
    for _ in range(2):
        assert keys(users, "rotate", "alice") == 0
        public.append(read_users(users.read_text())[-1].keys[-1])
    assert len(set(public)) == 3
    assert read_users(users.read_text())[-1].keys == tuple(public)
    said = capsys.readouterr().err
    assert "the one before stays good until" in said
    assert "the 2 before stay good until" in said
    assert keys(users, "revoke", "alice", "--old") == 0
    assert read_users(users.read_text())[-1].keys == (public[2],)


def test_a_refresh_changes_no_user(users: Path) -> None:
    assert keys(users, *CREATE) == 0
    written = users.read_text()
    users.write_text(written.replace("dynamix.v1.report", "dynamix.v0.report"))
    assert keys(users, "refresh") == 0
    assert users.read_text() == written


def test_what_cannot_be_is_refused_and_changes_nothing(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(users, *CREATE) == 0
    capsys.readouterr()
    for words, reason in (
        (("create", "bob", "--role", "trainer"), "a trainer's key is for what is named: add --job ID"),
        (("create", "bob", "--role", "collector"), "add --node NODE"),
        (("create", "bob", "--role", "trainer", "--job", "a b"), "cannot be part of a subject"),
        (("create", "bob", "--role", "reward", "--job", "a"), "a reward has no jobs of its own"),
        (("create", "reward", "--role", "trainer", "--job", "a"), "it would share its inbox"),
        ((*CREATE, "-o", "other.nkey"), "there is a user alice already"),
        (CREATE, "alice.nkey is there already"),
        (("rotate", "alcie"), "did you mean alice"),
        (("rotate", "reward"), "reward has a password and no key"),
        (("revoke", "bob"), "there is no user 'bob'"),
        (("revoke", "alice", "--old"), "alice has no older key"),
        (("create", "bob", "--role", "trainr", "--job", "a"), "invalid choice: 'trainr'"),
    ):
        assert reason in refused(users, capsys, *words), words


def test_a_rotation_never_replaces_anothers_key(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(users, *CREATE) == 0
    assert keys(users, "create", "bob", "--role", "trainer", "--job", "bob-1") == 0
    capsys.readouterr()
    assert "bob.nkey is the key of bob" in refused(users, capsys, "rotate", "alice", "-o", "bob.nkey")


def test_a_missing_or_foreign_file_of_users_is_said_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(tmp_path / "none.conf", "list") == 1
    assert "make one with `dynamix keys refresh`" in capsys.readouterr().err
    foreign = tmp_path / "nats.conf"
    foreign.write_text("port: 4222\n")
    assert keys(foreign, "list") == 1
    assert "it has no users: it is not a file of `dynamix keys`" in capsys.readouterr().err


def test_the_last_user_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broker").mkdir()
    path = tmp_path / "broker" / "users.conf"
    path.write_text('#: {"name": "watcher", "role": "watcher"}\nusers: []\n')
    assert "the broker would let anyone in" in refused(path, capsys, "revoke", "watcher")


def test_a_key_is_refused_where_the_broker_would_not_read_it(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration is of an earlier version, and was edited."""
    config = users.parent.parent / "nats.conf"
    config.write_text('accounts { DYNAMIX { include "broker/users.conf" } }\n')
    said = refused(users, capsys, "create", "alice", "--role", "trainer", "--job", "alice-1")
    assert f"{config} does not include the accounts of keys, without which the broker will not start: " in said
    assert 'add the line `include "broker/users-accounts.conf"` to its `accounts`' in said
    assert not Path("alice.nkey").exists()
    assert "does not include" in refused(users, capsys, "refresh")
    config.write_text(config.read_text() + 'include "broker/users-accounts.conf"\n')
    assert keys(users, "create", "alice", "--role", "trainer", "--job", "alice-1") == 0
    assert "nkey: " in users.with_name("users-accounts.conf").read_text()


def test_no_shard_has_the_name_of_anothers_accounts(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(users, "shard", "b-accounts") == 2
    assert "no shard's name ends with -accounts" in capsys.readouterr().err


def test_a_key_that_cannot_be_written_replaces_none(
    users: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of users is on a full disk: the key that the broker knows must stay."""
    assert keys(users, "create", "alice", "--role", "trainer", "--job", "alice-1") == 0
    before = Path("alice.nkey").read_text()

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(output_files, "write", full)
        assert keys(users, "rotate", "alice") == 1
        assert keys(users, "create", "erin", "--role", "watcher") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert Path("alice.nkey").read_text() == before
    assert not Path("erin.nkey").exists()
