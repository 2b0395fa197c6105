"""`dynamix simulate` on a scenario file, with the real data set."""

import json
from pathlib import Path

import pytest
from tests.support.small_suites import write_suite

from dynamix.cli.main import main

DATA = Path(__file__).parents[2] / ".data" / "fashion-mnist"


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """Two workers of 4000 and 1000 samples per second, in short windows."""
    write_suite(tmp_path, quick=1000)
    file = tmp_path / "quick-2.toml"
    file.write_text("window_steps = 4\n" + file.read_text())
    return str(file)


def test_a_run_is_told_as_a_table_and_as_json(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--policy", "proportional:smoothing=1,local_batch_size=32", "--data", str(DATA)]
    assert main(["simulate", scenario, *chosen, "--windows", "--json", "-"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)  # nothing else is on standard output
    assert result["time_to_target_s"] is not None
    assert [line["window"] for line in result["windows"]] == list(range(result["num_windows"]))
    assert result["windows"][0]["local_batch_sizes"] == [32, 32]
    assert result["windows"][2]["local_batch_sizes"] == [52, 12]  # 64 by 4 : 1
    assert result["windows"][-1]["time_s"] == pytest.approx(result["virtual_time_s"])
    assert shown.err.count("window ") == result["num_windows"]


def test_missing_data_is_said_with_the_way_to_get_it(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", scenario, "--policy", "static", "--data", str(tmp_path)]) == 1
    assert "make data" in capsys.readouterr().err
