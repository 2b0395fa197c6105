"""Settings: defaults, environment, arguments; and what is refused, by name."""

import re
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from dynamix.runtime import settings
from dynamix.runtime.settings import (
    BusSettings,
    SettingsError,
    SharedSettings,
    help_text,
    load,
    node_name,
    read,
    redact_url,
)
from dynamix.schemas.subjects import check_token


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings as a service has them."""

    alpha: float = 1.0
    """Weight of a rise
    in accuracy."""
    window_steps: Annotated[int, Meta(ge=1)] = 20
    """Steps per window."""
    formula: Literal["sgd", "adam"] = "sgd"
    trace: bool = False
    nodes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (32, 1024)
    limit: float | None = None


def reward(environ: dict[str, str] | None = None, **flags: str) -> RewardSettings:
    return read(RewardSettings, "reward", environ or {}, flags)


def test_a_flag_overrules_the_environment_which_overrules_the_default() -> None:
    environ = {"DYNAMIX_REWARD_ALPHA": "2.5", "DYNAMIX_REWARD_WINDOW_STEPS": "40", "DYNAMIX_REWARD_TRACE": ""}
    found = reward(environ, window_steps="50")
    assert (found.alpha, found.window_steps, found.formula, found.trace) == (2.5, 50, "sgd", False)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("alpha", "1e-3", 0.001),
        ("formula", "adam", "adam"),
        ("trace", "true", True),
        ("trace", "0", False),
        ("nodes", "a, b,c", ("a", "b", "c")),
        ("sizes", "1,2", (1, 2)),
        ("limit", "0.5", 0.5),
    ],
)
def test_text_becomes_the_type_of_the_field(field: str, text: str, value: object) -> None:
    assert getattr(reward({f"DYNAMIX_REWARD_{field.upper()}": text}), field) == value
    assert getattr(reward({}, **{field: text}), field) == value


def test_keys_of_other_components_and_programs_are_left_alone() -> None:
    environ = {"DYNAMIX_TRAINER_ANYTHING": "1", "DYNAMIX_NODE": "a", "DYNAMIX_NATS_URL": "nats://x", "PATH": "/bin"}
    assert reward(environ) == RewardSettings()


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("DYNAMIX_REWARD_ALHPA", "1", "unknown setting DYNAMIX_REWARD_ALHPA: did you mean DYNAMIX_REWARD_ALPHA"),
        ("DYNAMIX_REWRAD_ALPHA", "1", "unknown setting DYNAMIX_REWRAD_ALPHA: did you mean DYNAMIX_REWARD_ALPHA"),
        ("DYNAMIX_NOED", "1", "unknown setting DYNAMIX_NOED: did you mean DYNAMIX_NODE"),
        ("DYNAMIX_REWARD_ALPHA", "many", "DYNAMIX_REWARD_ALPHA='many': Expected `float`"),
        ("DYNAMIX_REWARD_WINDOW_STEPS", "0", "DYNAMIX_REWARD_WINDOW_STEPS='0': Expected `int` >= 1"),
        ("DYNAMIX_REWARD_FORMULA", "rmsprop", "DYNAMIX_REWARD_FORMULA='rmsprop': use one of sgd, adam"),
        ("DYNAMIX_REWARD_SIZES", "1,x", "DYNAMIX_REWARD_SIZES='1,x': Expected `int`"),
    ],
)
def test_a_wrong_key_or_value_is_an_error_that_names_it(key: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        reward({key: text})


def test_unknown_flags_passwords_as_flags_and_names_that_are_no_tokens_are_refused() -> None:
    for argument in ("--window-step", "alpha", "--nats-password"):
        with pytest.raises(SettingsError, match=f"unknown argument '{argument}'"):
            load("reward", RewardSettings, [argument, "3"])
    for key, value in (("NODE", "Node 1"), ("INSTANCE", "a.b"), ("JOB", "x" * 64)):
        with pytest.raises(SettingsError, match="cannot be part of a subject"):
            read(SharedSettings, "", {f"DYNAMIX_{key}": value})


def test_the_value_of_a_password_is_not_repeated_in_an_error() -> None:
    class Secret(msgspec.Struct, frozen=True, kw_only=True):
        password: int = 0

    with pytest.raises(SettingsError, match=r"DYNAMIX_NATS_PASSWORD=\*\*\*") as refused:
        read(Secret, "nats", {"DYNAMIX_NATS_PASSWORD": "hush"})
    assert "hush" not in str(refused.value)


def test_a_service_takes_its_own_shared_and_broker_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.os, "environ", {"DYNAMIX_NATS_PASSWORD": "hush", "DYNAMIX_REWARD_ALPHA": "3"})
    arguments = ["--node", "node-7", "--trace", "--nats-url", "nats://10.0.0.1:4222", "--nats-user=reward"]
    found = load("reward", RewardSettings, arguments)
    assert found.shared.node == "node-7"
    assert found.bus == BusSettings(url="nats://10.0.0.1:4222", user="reward", password="hush")
    assert (found.own.alpha, found.own.trace) == (3.0, True)


def test_any_host_name_gives_a_valid_node_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["Worker_1.example.ORG", "a" * 100, "10.0.0.1", "---", "gpu_1", "gpu-1", "gpu-1.site-a", "gpu-1.site-b"]
    names = set()
    for host in hosts:
        monkeypatch.setattr(settings.socket, "gethostname", lambda host=host: host)
        names.add(check_token(node_name(SharedSettings())))
    assert len(names) == len(hosts)
    assert node_name(SharedSettings(node="rack-3")) == "rack-3"


def test_help_names_every_setting_by_flag_and_key() -> None:
    text = help_text("reward", RewardSettings)
    for name in RewardSettings.__struct_fields__:
        assert f"--{name.replace('_', '-')} " in text
        assert f"DYNAMIX_REWARD_{name.upper()}, default " in text
    assert "Weight of a rise in accuracy." in text
    assert {"DYNAMIX_NODE", "DYNAMIX_NATS_PASSWORD", "--nats-password-file"} <= set(re.findall(r"[\w-]+", text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://me:secret@host:4222", "nats://me:***@host:4222"),
        ("nats://token@host", "nats://***:***@host"),
        ("lost nats://a:b@x and nats://c:d@y", "lost nats://a:***@x and nats://c:***@y"),
        ("nats://host:4222", "nats://host:4222"),
        ("mail me@example.org", "mail me@example.org"),
    ],
)
def test_a_url_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redact_url(text) == shown
