"""`dynamix simulate` on a scenario file, with the real data set."""

import json
from pathlib import Path

import pytest

from dynamix.cli.main import main

DATA = Path(__file__).parents[2] / ".data" / "fashion-mnist"
SCENARIO = """
family = "quick"
workload = "fashion-14-mlp"
target_accuracy = 0.5
fixed_time_s = 0.5
time_limit_s = 3
evaluate_every_s = 0.25
evaluation_samples = 1000
num_train_samples = 2000
window_steps = 4

[[workers]]
count = 2
samples_per_s = 4000

[[workers]]
samples_per_s = 1000
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    file = tmp_path / "quick.toml"
    file.write_text(SCENARIO)
    return str(file)


def test_a_run_is_told_as_a_table_and_as_json(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "simulate",
        scenario,
        "--policy",
        "proportional:smoothing=1,local_batch_size=32",
        "--data",
        str(DATA),
        "--windows",
    ]
    assert main([*arguments, "--json", "-"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)  # nothing else is on standard output
    assert result["time_to_target_s"] is not None
    assert [line["window"] for line in result["windows"]] == list(range(result["num_windows"]))
    assert result["windows"][0]["local_batch_sizes"] == [32, 32, 32]
    assert result["windows"][2]["local_batch_sizes"] == [43, 43, 10]  # 96 by 4 : 4 : 1
    assert result["windows"][-1]["time_s"] == pytest.approx(result["virtual_time_s"])
    assert shown.err.count("window ") == result["num_windows"]


def test_missing_data_is_said_with_the_way_to_get_it(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", scenario, "--policy", "static", "--data", str(tmp_path)]) == 1
    assert "make data" in capsys.readouterr().err
