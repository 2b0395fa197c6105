"""nkeys and the files that hold them: NATS's spelling, what is refused, and that no text shows a seed."""

from pathlib import Path

import pytest

from dynamix.runtime.bus.broker.login import Login
from dynamix.runtime.bus.broker.nkeys import UserKey, new_seed
from dynamix.runtime.key_file import KeyFile, key_file_text, read_key_file
from dynamix.runtime.settings import BusSettings, check_bus, key_of

SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
"""A pair from the documentation of NATS."""


def test_a_seed_has_the_public_key_that_nats_says() -> None:
    assert UserKey(SEED).public == PUBLIC


def test_a_new_seed_is_a_users_and_never_the_same() -> None:
    seeds = {new_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed.startswith("SU") and UserKey(seed).public.startswith("U") for seed in seeds)


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        (SEED[:-1] + "A", "check sum"),
        (SEED[:-8], "check sum"),
        (PUBLIC, "no seed of a user"),
        ("SAAPKPR7K3JEX3OEPRFXPRDBUMUIJTVOIWMIG4ATQX7FLYUUR5YGJC6QVA", "no seed of a user|no nkey"),
        ("SU not base32 at all", "base32"),
        ("", "check sum"),
    ],
)
def test_what_is_no_seed_of_a_user_is_refused_without_showing_it(seed: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        UserKey(seed)
    assert not seed or seed not in str(refused.value)


def test_a_credential_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "alice.nkey"
    file.write_text(key_file_text(SEED, name="alice", inbox="alice", jobs=("alice-1", "alice-2"), api="x.api."))
    assert read_key_file(file) == KeyFile(SEED, "alice", "alice", ("alice-1", "alice-2"), "x.api.")
    assert SEED not in repr(read_key_file(file))


def test_a_seed_that_another_tool_wrote_will_do(tmp_path: Path) -> None:
    file = tmp_path / "plain"
    file.write_text(f"{SEED}\n")
    assert read_key_file(file) == KeyFile(SEED)


def test_a_file_without_a_seed_is_refused_by_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "not.nkey"
    file.write_text("p0123\n")
    with pytest.raises(ValueError, match=r"DYNAMIX_NATS_NKEY_FILE='.*' cannot be used: it holds no line .* SU"):
        key_of(BusSettings(nkey_file=str(file)))
    with pytest.raises(ValueError, match=r"DYNAMIX_NATS_NKEY_FILE='/none' cannot be used: No such file"):
        check_bus(BusSettings(nkey_file="/none"))


def test_a_key_and_a_password_are_not_used_together(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SEED)
    with pytest.raises(ValueError, match="unset one of them"):
        check_bus(BusSettings(nkey_file=str(file), password="secret"))


def test_a_key_is_enough_beyond_loopback(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SEED)
    check_bus(BusSettings(url="tls://broker.example:4222", nkey_file=str(file)))


def test_a_certificates_key_needs_the_certificate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DYNAMIX_NATS_CERTIFICATE_FILE: set both"):
        check_bus(BusSettings(certificate_key_file=str(tmp_path / "key.pem")))
    with pytest.raises(ValueError, match=r"CERTIFICATE_FILE='/none' and .* cannot be used: No such file"):
        check_bus(BusSettings(certificate_file="/none"))


def test_an_identity_is_signed_alike_by_all_who_have_the_secret_and_otherwise_by_others(tmp_path: Path) -> None:
    """Also where the password's file is gone meanwhile: then by none but this connection."""
    password, key, gone = tmp_path / "password", tmp_path / "key", tmp_path / "gone"
    password.write_text("secret\n")
    key.write_text(SEED)
    ways = [{"password_file": str(password)}, {"nkey_file": str(key)}, {"password_file": str(gone)}]
    for path in (password, key):
        path.chmod(0o600)
    pairs = [[Login(BusSettings(user="u", **way), "x").sign_id("report:1") for _ in range(2)] for way in ways]
    assert [first == second for first, second in pairs] == [True, True, False]
    assert len({pair[0] for pair in pairs}) == 3
    one = Login(BusSettings(user="u", **ways[2]), "x")
    assert one.sign_id("report:1") == one.sign_id("report:1") != one.sign_id("report:2")
