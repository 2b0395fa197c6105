"""`dynamix learn`: a policy file, a line per update, and sentences for what cannot be done."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.support import learning
from tests.support.brokers import ConfiguredServer

from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.cli.main import main
from dynamix.cli.services import bus_environment
from dynamix.collector.agent_network import AgentNetwork
from dynamix.runtime.bus import Bus
from dynamix.schemas.policies import MULTIPLIERS

TINY = [
    "--workers",
    "1",
    "--episodes",
    "4",
    "--episodes-per-update",
    "2",
    "--validate-every",
    "2",
    "--ppo",
    "update_epochs=1",
]


SCENARIO = """
family = "mixed"
workload = "fashion-14-mlp"
target_accuracy = 0.65
fixed_time_s = 1.0
time_limit_s = 2.0
evaluate_every_s = 0.05
window_steps = 2
initial_local_batch_size = 32
base_global_batch_size = 128

[network]
gradient_bytes = 1000000

[[workers]]
count = 2
samples_per_s = 4000

[[workers]]
count = 2
samples_per_s = 1000
"""


@pytest.fixture
def scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one small scenario, and data to learn on."""
    learning.with_made_up_data(monkeypatch)
    directory = tmp_path / "scenarios"
    directory.mkdir()
    (directory / "two-speeds.toml").write_text(SCENARIO)
    return directory


def test_it_writes_a_policy_and_says_what_it_is_worth(
    scenarios: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, figures = tmp_path / "mine.safetensors", tmp_path / "learned.json"
    arguments = [
        "--policy",
        "mine",
        "--seed",
        "3",
        "-o",
        str(output),
        "--json",
        str(figures),
    ]
    assert main(["learn", "--scenarios", str(scenarios), *arguments, *TINY]) == 0
    told = capsys.readouterr()
    assert "update 2/2  episodes 4" in told.err
    assert f"wrote {output}" in told.out
    metadata = PolicyFile.read(output).metadata
    assert (metadata.policy, metadata.seeds, metadata.settings["update_epochs"]) == ("mine", (3,), 1)
    content = json.loads(figures.read_text())
    assert content["finished"]
    assert [row["num_episodes"] for row in content["updates"]] == [2, 4]
    assert content["metadata"]["scores"] == metadata.scores
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learned.json", "mine.safetensors", "scenarios"]


def test_time_that_is_over_is_said_and_the_same_command_goes_on(
    scenarios: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["learn", "--scenarios", str(scenarios), "-o", str(tmp_path / "ppo.safetensors"), *TINY]
    assert main([*command, "--minutes", "0"]) == 0
    assert "continues from" in capsys.readouterr().out
    assert main(command) == 0
    assert (tmp_path / "ppo.safetensors").exists()
    assert not (tmp_path / "ppo.safetensors.checkpoint").exists()


def test_reward_weights_and_objective_replace_the_presets(scenarios: Path, tmp_path: Path) -> None:
    output = tmp_path / "paper.safetensors"
    how = ["--policy", "ppo-paper", "--reward", "paper-adam", "--delta", "0", "--episode-end", "fixed"]
    tiny = ["--workers", "1", "--episodes", "2", "--objective", "clipped"]
    assert main(["learn", "--scenarios", str(scenarios), "-o", str(output), *how, *tiny]) == 0
    metadata = PolicyFile.read(output).metadata
    assert (metadata.action_set, metadata.algorithm, metadata.reward_formula) == ("deltas", "clipped", "paper-adam")
    assert metadata.reward_weights == {"accuracy": 1.0, "alpha": 1.0, "beta": 0.1, "delta": 0.0, "eta": 0.01}


def test_agents_are_learned_by_a_curriculum(scenarios: Path, tmp_path: Path) -> None:
    output = tmp_path / "agents.safetensors"
    how = ["--policy", "stigmergy", "--curriculum", "2,4"]
    assert main(["learn", "--scenarios", str(scenarios), "-o", str(output), *how, *TINY]) == 0
    metadata = PolicyFile.read(output).metadata
    assert (metadata.policy, metadata.action_set) == ("stigmergy", "appetite")
    assert metadata.scenarios == ("two-speeds-of-2", "two-speeds-of-4")
    assert AgentNetwork.read(output).actions == MULTIPLIERS


def _must_not_run(*_: object, **__: object) -> None:
    raise AssertionError("a plan that cannot be was learned")


async def test_a_policy_is_put_on_the_bus_when_that_is_asked_for(
    scenarios: Path, tmp_path: Path, server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bus_environment(server.settings).items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "mine.safetensors"
    command = ["learn", "--scenarios", str(scenarios), "--policy", "mine", "-o", str(output), "--publish", *TINY]
    assert await asyncio.to_thread(main, command) == 0
    stored = await PolicyStore(bus).get("mine")
    assert (stored.version, stored.data) == (1, output.read_bytes())


def test_without_a_broker_nothing_is_learned_that_shall_be_published(
    scenarios: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setattr("dynamix.cli.commands.learn.learning.learn", _must_not_run)
    command = ["learn", "--scenarios", str(scenarios), "--policy", "mine", "-o", str(tmp_path / "x.safetensors")]
    assert main([*command, "--publish", *TINY]) == 1
    assert "no broker at nats://127.0.0.1:1" in capsys.readouterr().err
