"""`dynamix policy` and `dynamix provision` on a real broker, as the users of a deployment, and without any broker."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import learned, virtual
from tests.support.deployed_broker import DeployedBroker, become, deployed_broker
from tests.support.raw_client import raw_client

from dynamix.arbitrator.learned import policy_file
from dynamix.arbitrator.learned.policy_file import ActionSetName, PolicyFile
from dynamix.cli.main import main
from dynamix.extras.calibration.fit import scenario_text
from dynamix.lab.learning.trial import Trial
from dynamix.runtime.bus.authority import Authority
from dynamix.schemas.streams import STREAMS

FIRST, SECOND, OTHER = (
    learned.policy_file(seeds=(seed,), scores={"vs_rule": 0.93}, scenarios=("mixed-8",), gain=300.0).to_bytes()
    for seed in (1, 2, 3)
)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeployedBroker]:
    """The deployed broker with its streams; the environment is the learner's."""
    directory = tmp_path / "broker"
    directory.mkdir()
    with deployed_broker(directory) as running:
        become(monkeypatch, running, "provision")
        assert main(["provision", "--json", str(tmp_path / "provision.json")]) == 0
        become(monkeypatch, running, "learner")
        yield running


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for the shipped one, with one policy in it."""
    directory = tmp_path / "shipped"
    directory.mkdir()
    (directory / "ppo.safetensors").write_bytes(OTHER)
    monkeypatch.setattr(policy_file, "shipped_directory", lambda: directory)
    return directory


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command gives to programs."""
    capsys.readouterr()
    assert main(["policy", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_imported_is_listed_shown_and_exported(
    broker: DeployedBroker,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, data in enumerate((FIRST, SECOND)):
        (tmp_path / f"{number}.safetensors").write_bytes(data)
        assert main(["policy", "import", str(tmp_path / f"{number}.safetensors")]) == 0
    assert "ppo version 3 (" in capsys.readouterr().out
    assert main(["policy", "import", str(tmp_path / "0.safetensors"), "--name", "mine"]) == 0

    become(monkeypatch, broker, "watcher")
    listed = result_of(capsys, "list")
    assert listed["broker"] is True
    versions = [(policy["name"], policy["version"], policy["origin"]) for policy in listed["policies"]]
    assert versions == [("mine", 1, "bus"), ("ppo", 3, "bus"), ("ppo", 2, "bus"), ("ppo", 1, "shipped")]

    shown = result_of(capsys, "show", "ppo")
    assert (shown["policy"]["version"], shown["usable"], shown["metadata"]["seeds"]) == (3, True, [2])
    assert main(["policy", "show", "ppo:1"]) == 0
    text = capsys.readouterr().out
    assert "origin              shipped" in text
    assert "scores              {'vs_rule': 0.93}" in text

    for name, data in (("ppo:2", FIRST), ("ppo", SECOND), ("ppo:1", (package / "ppo.safetensors").read_bytes())):
        assert main(["policy", "export", name, "-o", str(tmp_path / "out")]) == 0
        assert (tmp_path / "out").read_bytes() == data


@pytest.mark.usefixtures("package")
def test_what_cannot_be_done_is_said_in_a_sentence(
    broker: DeployedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, older, dead = (tmp_path / f"{name}.safetensors" for name in ("good", "older", "dead"))
    good.write_bytes(FIRST)
    dead.write_bytes(learned.policy_file(favour=(1, 0, 0)).to_bytes())
    older.write_bytes(learned.of_other_features())
    for arguments, reason in (
        (["import", str(older)], "policy 'ppo': its inputs are not those of this program (ping_ms)"),
        (["test", str(older)], "policy 'ppo': its inputs are not those of this program (ping_ms)"),
        (["import", str(dead)], f"{dead} is dead: its choices do not depend on its state"),
        (["import", str(good), "--name", "static"], "'static' is the name of a policy in code"),
        (["import", str(good), "--name", "My policy"], "cannot be part of a subject"),
        (["import", str(tmp_path)], f"{tmp_path}: not a regular file"),
        (["show", "ppo:9"], "no learned policy ppo:9: there is ppo:1"),
    ):
        assert main(["policy", *arguments]) == 1
        assert reason in capsys.readouterr().err
    become(monkeypatch, broker, "watcher")
    assert main(["policy", "import", str(good)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dynamix policy: the broker does not let user 'watcher' publish to dynamix.v1.policy.ppo")
    broker.credential("watcher").write_text(Authority.new().issue("watcher", "watcher", [], days=1).text())
    assert main(["policy", "list"]) == 1
    assert "refuses user 'watcher'" in capsys.readouterr().err


@pytest.mark.usefixtures("package")
def test_a_broker_without_a_bucket_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed_broker(tmp_path) as broker:
        become(monkeypatch, broker, "watcher")
        assert main(["policy", "list"]) == 0
    shown = capsys.readouterr()
    assert "has no stream for policies: run `dynamix provision`; these come with the package" in shown.err
    assert "ppo" in shown.out


def test_without_a_broker_the_packages_policies_are_shown_and_that_is_said(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    (package / "older.safetensors").write_bytes(learned.of_other_features())
    assert main(["policy", "list"]) == 0
    shown = capsys.readouterr()
    assert "no broker at nats://127.0.0.1:1" in shown.err
    assert [line.split()[:2] for line in shown.out.splitlines()[1:]] == [["older", "1"], ["ppo", "1"]]
    assert main(["policy", "show", "older"]) == 0
    assert "no: policy 'ppo': its inputs are not those" in capsys.readouterr().out
    assert main(["policy", "export", "ppo", "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    for arguments in (["show", "ppo:2"], ["import", str(tmp_path / "out")]):
        assert main(["policy", *arguments]) == 1
        assert "no broker at nats://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(("action_set", "shrinks"), [("levers", (1, 2, 0)), ("deltas", (1,))])
def test_a_policy_that_ignores_its_state_or_is_slower_than_a_constant_fails_its_trial(
    action_set: ActionSetName, shrinks: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = virtual.scenario(target_accuracy=0.8, exchange="local", time_limit_s=60.0)
    path, scenarios = tmp_path / "mine.safetensors", tmp_path / "scenarios"
    scenarios.mkdir()
    (scenarios / "two-speeds.toml").write_text(scenario_text(scenario, "two speeds"))

    def faults(file: PolicyFile) -> list[str]:
        path.write_bytes(file.to_bytes())
        assert main(["policy", "test", str(path), "--scenarios", str(scenarios), "--json", "-"]) == 1
        found: list[str] = json.loads(capsys.readouterr().out)["faults"]
        return found

    dead, slow = faults(learned.policy_file(action_set, favour=shrinks))
    assert dead.startswith("it is dead: 0.0% of decisions change with the state")
    assert "of the time of a constant" in slow
    (slow,) = faults(learned.policy_file(action_set, gain=300.0))  # what it does is as good as drawn
    assert "of the time of a constant" in slow


def test_a_policy_that_depends_on_its_state_and_is_faster_than_a_constant_passes_its_trial() -> None:
    trial = Trial({"all": 0.4}, "64 samples per rank", {"one": 0.5, "two": 1.28})
    assert (trial.faults, trial.mean_vs_constant) == ([], pytest.approx(0.8))
    assert len(trial._replace(vs_constant={"one": 1.0}).faults) == 1
    assert len(trial._replace(dependence={"all": 0.009}).faults) == 1


# --- dynamix provision ---


@pytest.fixture
def bare_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeployedBroker]:
    """The deployed bare_broker; the environment is that of dynamix-provision.service."""
    with deployed_broker(tmp_path) as running:
        become(monkeypatch, running, "provision")
        yield running


@pytest.mark.usefixtures("bare_broker")
def test_the_streams_are_made_once_and_then_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["provision"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{stream.name}: created" for stream in STREAMS]
    assert main(["provision", "--json", "-"]) == 0
    expected = {"streams": [{"stream": stream.name, "result": "unchanged"} for stream in STREAMS]}
    assert json.loads(capsys.readouterr().out) == expected


def test_what_was_stored_on_a_subject_is_removed_and_decisions_never_are(
    bare_broker: DeployedBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def store() -> None:
        async with raw_client(bare_broker.settings("trainer")) as client:
            for run in ("r1", "r2"):
                await client.ask(f"dynamix.v1.report.alice.{run}.node-a", b"x")
            await client.ask("dynamix.v1.report.job.r1.node-a", b"x")

    assert main(["provision"]) == 0
    asyncio.run(store())
    capsys.readouterr()
    assert main(["provision", "--purge", "dynamix.v1.report.alice.*.*"]) == 0
    assert capsys.readouterr().out == "REPORTS: 2 messages removed\n"
    assert main(["provision", "--purge", "dynamix.v1.action.alice.*"]) == 1
    assert main(["provision", "--purge", "dynamix.v1.live.>"]) == 2
    become(monkeypatch, bare_broker, "watcher")
    assert main(["provision", "--purge", "dynamix.v1.report.>"]) == 1
