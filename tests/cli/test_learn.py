"""`dynamix learn`: a policy file, a line per update, and sentences for what cannot be done."""

import json
from pathlib import Path

import pytest
from tests.support import learning

from dynamix.arbitrator.learned.policy_store import read_policy_file
from dynamix.cli.main import main
from dynamix.extras.calibration.fit import scenario_text

TINY = ["--workers", "1"]
for one in ("num_updates=3", "jobs_per_scenario=2", "windows_per_job=4", "update_epochs=1", "validate_every=2"):
    TINY += ["--set", one]


@pytest.fixture
def scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one small scenario, and data to learn on."""
    learning.with_made_up_data(monkeypatch)
    directory = tmp_path / "scenarios"
    directory.mkdir()
    (directory / "two-speeds.toml").write_text(scenario_text(learning.scenarios()[0], "two speeds"))
    return directory


def test_it_writes_a_policy_of_the_preset_as_it_was_changed_and_says_what_it_is_worth(
    scenarios: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, figures = tmp_path / "mine.safetensors", tmp_path / "learned.json"
    arguments = ["--policy", "mine", "--seed", "3", "-o", str(output), "--json", str(figures)]
    arguments += ["--png", str(tmp_path / "a.png")]
    for one in ("formula=paper-adam", "delta=0", "objective=simplified"):
        arguments += ["--set", one]
    assert main(["learn", "--scenarios", str(scenarios), *arguments, *TINY]) == 0
    told = capsys.readouterr()
    assert "update 3/3  return" in told.err
    assert f"wrote {output}" in told.out
    metadata = read_policy_file(output).metadata
    assert (metadata.policy, metadata.seeds, metadata.settings.update_epochs) == ("mine", (3,), 1)
    assert (metadata.settings.objective, metadata.reward_formula) == ("simplified", "paper-adam")
    assert metadata.reward_weights == {"accuracy": 1.0, "alpha": 1.0, "beta": 0.1, "delta": 0.0, "eta": 0.01}
    content = json.loads(figures.read_text())
    assert [row["update"] for row in content["updates"]] == [1, 2, 3]
    assert content["metadata"]["scores"] == metadata.scores
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.png",
        "learned.json",
        "mine.safetensors",
        "scenarios",
    ]
