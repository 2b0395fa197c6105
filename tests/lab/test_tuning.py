"""Choosing the baselines' settings: the same budget for all, on train scenarios only."""

from pathlib import Path

import pytest
from tests.support.small_suites import made_up, write_suite

from dynamix.lab.comparison import tuning
from dynamix.lab.comparison.rows import Choice, Tuned, parse_rows, read_tuned, to_toml
from dynamix.lab.comparison.runs import Ledger, RunTask
from dynamix.lab.simulator.scenario import Suite

BEST = {"mixed": 128, "alike": 64}


def time_s(task: RunTask) -> float | None:
    """Best at a size per family; 32 is missed, other sizes take twice as long."""
    size = task.setting.local_batch_size
    if size == 32:
        return None
    return 0.5 if size == BEST[task.scenario.family] else 1.0


@pytest.fixture
def train(tmp_path: Path) -> Suite:
    return write_suite(tmp_path / "train", mixed=1000, alike=4000)


@pytest.fixture
def tuned(train: Suite, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    monkeypatch.setattr("dynamix.lab.comparison.runs.outcomes", made_up(time_s))
    with Ledger() as ledger:
        return tuning.tune(train, ledger, seeds=[10_000, 10_001], command="dynamix tune")


def test_every_baseline_has_the_same_number_of_settings() -> None:
    for settings in (*tuning.GRID.values(), *tuning.EXCHANGE_GRID.values()):
        assert len({row.label for row in settings}) == tuning.NUM_SETTINGS


def test_the_best_setting_is_chosen_per_family(tuned: Tuned) -> None:
    for family, size in BEST.items():
        choice = tuned.families[family]["static"]
        assert (choice.setting, choice.initial_local_batch_size, choice.score_s) == (f"static@{size}", size, 0.5)
        assert choice.scores_s["static@32"] == 2.0  # the limit
        assert choice.misses == {f"static@{other}": 2 * (other == 32) for other in tuning.SIZES}


def test_over_all_families_the_geometric_mean_decides(tuned: Tuned) -> None:
    overall = tuned.overall["static"]
    assert overall.setting == "static@64"  # 64 and 128 are alike: the first
    assert overall.scores_s["static@64"] == pytest.approx(0.707, abs=1e-3)  # sqrt(0.5 * 1.0)


def test_the_file_holds_what_was_chosen(tuned: Tuned, train: Suite, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(to_toml(tuned))
    assert read_tuned(path) == tuned
    assert (tuned.scenarios, tuned.seeds, tuned.num_settings) == (train.digest, [10_000, 10_001], 6)


def test_a_file_that_is_missing_or_spoilt_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dynamix tune -o"):
        read_tuned(tmp_path / "tuned.toml")
    (tmp_path / "tuned.toml").write_text("sizes = 3\n")
    with pytest.raises(ValueError, match=r"sizes.*dynamix tune"):
        read_tuned(tmp_path / "tuned.toml")


def test_what_has_no_settings_is_not_tuned(train: Suite) -> None:
    with (
        Ledger() as ledger,
        pytest.raises(ValueError, match="'static-of-old' has no settings to tune"),
    ):
        tuning.tune(train, ledger, seeds=[0], baselines=["static-of-old"])


def test_what_decides_exchanges_is_tuned_in_jobs_that_permit_it(train: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_setting(task: RunTask) -> float:
        assert task.effective_scenario.exchange == "local"
        return 0.5 if task.setting.options.get("every") == 16.0 else 1.0

    monkeypatch.setattr("dynamix.lab.comparison.runs.outcomes", made_up(of_setting))
    with Ledger() as ledger:
        tuned = tuning.tune(train, ledger, seeds=[10_000], baselines=["diloco", "static+local"], exchange="local")
        with pytest.raises(ValueError, match="does not permit: use --exchange local"):
            tuning.tune(train, ledger, seeds=[10_000], baselines=["diloco"])
    assert tuned.overall["diloco"].options["every"] == 16.0
    both = Tuned(overall={"static": Choice(initial_local_batch_size=8)}).with_choices(tuned)
    local = parse_rows("best-static:track=1,every=4,codec=int8")[0].settings("mixed", both)[0]
    assert local.local_batch_size == tuned.overall["static+local"].initial_local_batch_size == 8
    assert local.options == {"codec": 5.0, "every": 4.0, "track": 1.0}
