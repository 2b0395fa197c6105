"""Rows of a comparison: what a file or a short text means, and what each row runs with in a family."""

from pathlib import Path

import pytest
from tests.support.small_suites import made_up, tuned_for, write_suite

from dynamix.cli.commands.evaluate import POLICIES
from dynamix.lab.comparison import tuning
from dynamix.lab.comparison.rows import (
    BASES,
    ORACLE_SIZES,
    Choice,
    Row,
    Tuned,
    make_row,
    parse_rows,
    read_rows,
    read_tuned,
    to_toml,
    untuned_families,
    with_references,
)
from dynamix.lab.comparison.runs import Ledger, RunTask
from dynamix.lab.simulator.scenario import TUNED_EXCHANGE_FILE, TUNED_FILE, Suite, scenario_root


def only_row(text: str) -> Row:
    (row,) = parse_rows(text)
    return row


def only_setting(text: str, tuned: Tuned | None = None) -> Row:
    (setting,) = only_row(text).settings("mixed", tuned or Tuned())
    return setting


@pytest.mark.parametrize(
    ("text", "row", "label"),
    [
        ("static:every=4,codec=int8", {"options": {"codec": "int8", "every": 4.0}}, "static:every=4,codec=int8"),
        ("goodput:track=1", {"options": {"track": 1.0}}, "goodput+track"),
        ("static:local_batch_size=128", {"local_batch_size": 128}, "static@128"),
        ("rule:exchange=exact", {"exchange": "exact"}, "rule/exchange=exact"),
        ("rule:learning_rate_factor=1.5", {"learning_rate_factor": 1.5}, "rule/rate=1.5"),
        ("rule:learning_rate_factor=best", {"learning_rate_factor": "best"}, "rule/rate=best"),
    ],
)
def test_a_text_and_a_table_make_the_same_row(text: str, row: dict[str, object], label: str) -> None:
    policy = text.partition(":")[0]
    assert only_row(text) == make_row({"policy": policy, **row, "name": label})
    assert only_row(text).label == label


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("goodputt", "no policy is called 'goodputt'"),
        ("rule:noise_multiplier", "'noise_multiplier' is not KEY=VALUE"),
        ("static:codec=int9", "option codec=int9: use one of none, rows, "),
        ("rule:noise_multiplier=-1", "noise_multiplier=-1.*must be from"),
        ("rule:learning_rate_factor=inf", "learning_rate_factor must be finite"),
        ("static:local_batch_size=0", "local_batch_size"),
        ("oracle:learning_rate_factor=best", "set local_batch_size"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rows(text)


def test_a_file_of_rows_is_read_and_a_wrong_one_is_refused_by_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(
        '[[row]]\npolicy = "static"\noptions = { codec = "int8" }\nagainst = true\n[[row]]\npolicy = "rule"\n'
    )
    static, rule = read_rows(path)
    assert (static.label, static.options, static.against) == ("static:codec=int8", {"codec": "int8"}, True)
    assert rule == only_row("rule")
    for content, message in (
        ('[[row]]\npolicy = "rule"\n[[row]]\npolicy = "rul"\n', "row 2: no policy is called 'rul'"),
        ('[[row]]\npolicy = "rule"\n[[row]]\npolicy = "rule"\n', "two rows are called 'rule'"),
        ("[[row\n", "rows.toml"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_rows(path)
    with pytest.raises(ValueError, match="No such file or directory; name a TOML file"):
        read_rows(tmp_path / "none.toml")


def test_every_shipped_file_of_rows_and_of_settings_can_be_read() -> None:
    for path in (scenario_root() / "rows").iterdir():
        assert len(read_rows(path)) > 1
    for name in (TUNED_FILE, TUNED_EXCHANGE_FILE):
        assert read_tuned(scenario_root() / name).overall


def test_baselines_run_with_what_was_tuned_for_the_family_and_options_of_the_row_come_on_top() -> None:
    tuned = tuned_for(mixed=256)
    assert only_setting("best-static", tuned) == Row(policy="static", local_batch_size=256)
    assert only_setting("goodput", tuned).options == {"noise_multiplier": 2.0}
    assert only_setting("goodput:noise_multiplier=1", tuned).options == {"noise_multiplier": 1.0}
    assert only_setting("goodput:track=1", tuned).options == {"noise_multiplier": 2.0, "track": 1.0}
    assert only_setting("static", tuned) == Row(policy="static")
    assert only_setting("rule", tuned) == Row(policy="rule")


def test_default_rows_contain_what_the_default_policy_is_compared_with_first_each_as_tuned() -> None:
    goodput = Choice(setting="goodput", options={"noise_multiplier": 2.0, "smoothing": 0.2, "track": 1.0})
    sizes = {name: Choice(initial_local_batch_size=size) for name, size in (("static", 32), ("static+track", 16))}
    tuned = Tuned(families={"mixed": {"goodput": goodput, **sizes}})
    rows = {row.label: row for row in with_references(parse_rows(POLICIES))}
    assert set(BASES) <= set(rows)
    (published,) = rows["goodput:hysteresis=0.05,noise_multiplier=1,track=0"].settings("mixed", tuned)
    assert published.options == {"hysteresis": 0.05, "noise_multiplier": 1.0, "smoothing": 0.2, "track": 0.0}
    for label, size, options in (
        ("best-static", 32, {}),
        ("best-static+track", 16, {"track": 1.0}),
        ("static+track@64", 64, {"track": 1.0}),
    ):
        assert rows[label].settings("mixed", tuned) == (Row(policy="static", local_batch_size=size, options=options),)


def test_a_family_without_a_train_part_falls_back_to_the_best_over_all_and_best_static_needs_a_choice() -> None:
    tuned = tuned_for(other=256)
    assert only_setting("best-static", tuned).local_batch_size == 128
    tracked = only_row("best-static:track=1")  # sizes tuned without the fast loop are used, and reported
    assert tracked.settings("other", tuned)[0].local_batch_size == 256
    assert untuned_families(tracked, ["other"], tuned) == ["other"]
    with pytest.raises(ValueError, match="dynamix evaluate tune"):
        only_setting("best-static")


def test_the_best_learning_rate_is_one_of_three_rows_and_the_oracle_one_of_several_sizes() -> None:
    best = only_row("goodput:track=1,learning_rate_factor=best").permitted("lossy")
    assert [part.label for part in best.best_of] == ["goodput+track/rate=0.5", "goodput+track", "goodput+track/rate=2"]
    assert [row.learning_rate_factor for row in best.settings("mixed", Tuned())] == [0.5, 1.0, 2.0]
    oracle = only_row("oracle")
    assert [part.label for part in oracle.best_of] == [f"oracle@{size}" for size in ORACLE_SIZES]
    assert untuned_families(oracle, ["mixed"], Tuned()) == []


@pytest.mark.parametrize(
    ("text", "exchange"),
    [
        ("rule", "local"),
        ("rule:exchange=exact", "exact"),
        ("static:every=4", "local"),
        ("best-static", None),
        ("ppo", "local"),
        ("ppo-paper", None),
    ],
)
def test_a_permission_is_given_to_rows_that_can_use_it(text: str, exchange: str | None) -> None:
    row = only_row(text).permitted("local")
    assert {part.exchange for part in row.best_of or (row,)} == {exchange}


def test_every_file_of_a_learned_policy_is_a_policy_seed_known_by_its_content(tmp_path: Path) -> None:
    files = [tmp_path / f"mine-{number}.safetensors" for number in range(3)]
    for file, content in zip(files, (b"\0", b"\1", b"\0"), strict=True):
        file.write_bytes(content)
    mine = make_row({"policy": "mine", "files": list(map(str, files))})
    first, second, again = mine.settings("mixed", Tuned())
    assert first.identity()["policy_digest"] == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert first.identity() == again.identity() != second.identity()
    (missing,) = parse_rows("mine:files=/nowhere/x.safetensors")
    with pytest.raises(ValueError, match=r"/nowhere/x\.safetensors: No such file"):
        missing.settings("mixed", Tuned())


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


def test_the_best_setting_is_chosen_per_family_and_the_file_holds_it(
    train: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.lab.comparison.runs.run_episodes", made_up(time_s))
    with Ledger() as ledger:
        tuned = tuning.tune(train, tuning.settings_of(), ledger, seeds=[10_000, 10_001])
    for family, size in BEST.items():
        choice = tuned.families[family]["static"]
        assert (choice.setting, choice.initial_local_batch_size, choice.score_s) == (f"static@{size}", size, 0.5)
        assert choice.scores_s["static@32"] == 2.0  # the limit
        assert choice.misses == {f"static@{other}": 2 * (other == 32) for other in (8, 16, 32, 64, 128, 256)}
    path = tmp_path / "tuned.toml"
    path.write_text(to_toml(tuned))
    assert read_tuned(path) == tuned
    assert (tuned.scenarios, tuned.seeds, tuned.num_settings) == (train.digest, [10_000, 10_001], 6)


def test_what_decides_exchanges_is_tuned_in_jobs_that_permit_it(train: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_setting(task: RunTask) -> float:
        assert task.effective_scenario.exchange == "local"
        return 0.5 if task.setting.options.get("every") == 16.0 else 1.0

    monkeypatch.setattr("dynamix.lab.comparison.runs.run_episodes", made_up(of_setting))
    with Ledger() as ledger:
        rows = [row for row in tuning.settings_of("local") if row.policy in ("diloco", "static")]
        tuned = tuning.tune(train, rows, ledger, seeds=[10_000], exchange="local")
        with pytest.raises(ValueError, match="does not permit: use --exchange local"):
            tuning.tune(train, rows, ledger, seeds=[10_000])
    assert tuned.overall["diloco"].options["every"] == 16.0
    both = Tuned(overall={"static": Choice(initial_local_batch_size=8)}).with_choices(tuned)
    local = parse_rows("best-static:track=1,every=4,codec=int8")[0].settings("mixed", both)[0]
    assert local.local_batch_size == tuned.overall["static+local"].initial_local_batch_size == 8
    assert local.options == {"codec": "int8", "every": 4.0, "track": 1.0}
