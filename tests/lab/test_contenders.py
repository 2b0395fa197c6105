"""How rows are spelled, and what each runs with."""

from pathlib import Path

import pytest
from tests.support.small_suites import tuned_for

from dynamix.cli.commands.evaluate.command import POLICIES
from dynamix.lab.experiments.comparison.contenders import (
    BASES,
    ORACLE_SIZES,
    Contender,
    Setting,
    parse_contender,
    parse_contenders,
    shipped_files,
    untuned_families,
    with_references,
)
from dynamix.lab.experiments.comparison.contenders import TRACKED_STATIC as TRACKED
from dynamix.lab.experiments.comparison.tuned import Choice, Tuned
from dynamix.schemas.messages.policies import DEFAULT_POLICY


def only_setting(text: str, tuned: Tuned | None = None) -> Setting:
    (setting,) = parse_contender(text).settings("mixed", tuned or Tuned())
    return setting


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("goodput", Setting(policy="goodput")),
        ("static:every=4,codec=int8", Setting(policy="static", options={"codec": 5.0, "every": 4.0})),
        ("goodput+track", Setting(policy="goodput", options={"track": 1.0})),
        ("rule:noise_multiplier=2,track=0", Setting(policy="rule", options={"noise_multiplier": 2.0, "track": 0.0})),
        ("static@128", Setting(policy="static", initial_local_batch_size=128)),
        ("goodput/lr=linear", Setting(policy="goodput", learning_rate_rule="linear")),
        ("rule/lr=none/exchange=exact", Setting(policy="rule", learning_rate_rule="none", exchange="exact")),
        (
            "doubling+track:every_samples=6e4@64/lr=none",
            Setting(
                policy="doubling",
                options={"every_samples": 6e4, "track": 1.0},
                initial_local_batch_size=64,
                learning_rate_rule="none",
            ),
        ),
    ],
)
def test_a_row_is_what_its_spelling_says(text: str, setting: Setting) -> None:
    assert only_setting(text) == setting


def test_a_comma_ends_a_row_but_not_its_options() -> None:
    rows = parse_contenders("static@64, rule:noise_multiplier=2,track=0,goodput/lr=linear")
    assert [row.label for row in rows] == ["static@64", "rule:noise_multiplier=2,track=0", "goodput/lr=linear"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("goodputt", "no policy is called 'goodputt'"),
        ("Goodput!", r"write NAME\[\+track\]"),
        ("rule:noise_multiplier", "must be NAME=NUMBER"),
        ("rule:noise_multiplier=much", "option noise_multiplier='much' is not a number"),
        ("static:codec=int9@64", "option codec='int9' is not a number, nor one of none, rows, sketch, bf16"),
        ("rule:noise_multiplied=2", "no option 'noise_multiplied'"),
        ("rule:noise_multiplier=-1", "noise_multiplier=-1.*must be from"),
        ("rule/rate=0", "'rule/rate=0': the factor on the learning rate is a number above 0, or best"),
        ("rule/rate=fast", "a number above 0, or best"),
        ("oracle/rate=best", "the best of rows that are the best of others"),
        ("oracle:track=1@8", "no option 'track'"),
        ("goodput/lr=cubic", "'cubic' must be one of none, linear, sqrt"),
        ("rule/exchange=fast", "'fast', must be one of exact, lossy, local"),
    ],
)
def test_a_row_that_is_spelled_wrongly_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_contenders(text)


def test_rivals_run_with_what_was_tuned_for_the_family_and_typed_options_come_on_top() -> None:
    tuned = tuned_for(mixed=256)
    assert only_setting("best-static", tuned) == Setting(policy="static", initial_local_batch_size=256)
    assert only_setting("goodput", tuned).options == {"noise_multiplier": 2.0}
    assert only_setting("goodput:noise_multiplier=1", tuned).options == {"noise_multiplier": 1.0}
    assert only_setting("goodput+track", tuned).options == {"noise_multiplier": 2.0, "track": 1.0}
    assert only_setting("static", tuned) == Setting(policy="static")
    assert only_setting("rule", tuned) == Setting(policy="rule")


def test_what_evaluate_compares_by_default_stands_on_the_tuned_settings_where_nothing_is_typed() -> None:
    goodput = Choice(setting="goodput", options={"noise_multiplier": 2.0, "smoothing": 0.2, "track": 1.0})
    sizes = {baseline: Choice(initial_local_batch_size=size) for baseline, size in (("static", 32), (TRACKED, 16))}
    tuned = Tuned(families={"mixed": {"goodput": goodput, **sizes}})
    rows = {row.label: row for row in with_references(parse_contenders(POLICIES))}
    assert set(BASES) <= set(rows)
    (published,) = rows["goodput:hysteresis=0.05,noise_multiplier=1,track=0"].settings("mixed", tuned)
    assert published.options == {"hysteresis": 0.05, "noise_multiplier": 1.0, "smoothing": 0.2, "track": 0.0}
    assert rows["goodput"].settings("mixed", tuned)[0].options == goodput.options
    for label, size, options in (("best-static", 32, {}), ("best-static+track", 16, {"track": 1.0})):
        (setting,) = rows[label].settings("mixed", tuned)
        assert (setting.policy, setting.initial_local_batch_size, setting.options) == ("static", size, options)
    (constant,) = rows["static+track@64"].settings("mixed", tuned)
    assert (constant.initial_local_batch_size, constant.options) == (64, {"track": 1.0})


def test_static_sizes_that_were_tuned_without_the_fast_loop_stand_in_and_are_told() -> None:
    row, tuned = parse_contender("best-static+track"), tuned_for(mixed=256)
    assert row.settings("mixed", tuned)[0].initial_local_batch_size == 256
    assert untuned_families(row, ["mixed"], tuned) == ["mixed"]
    assert untuned_families(parse_contender("best-static"), ["mixed"], tuned) == []


def test_the_best_learning_rate_is_one_of_three_rows_of_the_same_policy() -> None:
    row = parse_contender("goodput+track/lr=linear/rate=best")
    assert [part.label for part in row.best_of] == [
        *("goodput+track/lr=linear/rate=0.5", "goodput+track/lr=linear", "goodput+track/lr=linear/rate=2")
    ]
    factors = [setting.learning_rate_factor for setting in row.settings("mixed", Tuned())]
    assert factors == [0.5, 1.0, 2.0]
    assert only_setting("rule/rate=1.5").learning_rate_factor == 1.5


def test_the_oracle_is_one_of_several_constant_sizes() -> None:
    row = parse_contender("oracle")
    assert [part.label for part in row.best_of] == [f"oracle@{size}" for size in ORACLE_SIZES]
    assert {setting.policy for setting in row.settings("mixed", Tuned())} == {"oracle"}
    assert untuned_families(row, ["mixed"], Tuned()) == []


@pytest.mark.parametrize(
    ("text", "exchange"),
    [
        ("rule", "local"),
        ("rule/exchange=exact", "exact"),
        ("static:every=4", "local"),
        ("static@64", None),
        ("static:codec=none@64", None),
        ("goodput", None),
        ("random", None),
        ("ppo", None),
    ],
)
def test_a_permission_is_given_to_rows_that_make_use_of_it(text: str, exchange: str | None) -> None:
    assert parse_contender(text).permitted("local").exchange == exchange


def test_each_part_of_a_best_row_gets_the_permission() -> None:
    parts = parse_contender("rule/rate=best").permitted("lossy").best_of
    assert [part.exchange for part in parts] == ["lossy"] * 3


def test_a_family_without_a_train_part_falls_back_to_what_is_best_over_all() -> None:
    tuned = tuned_for(other=256)
    assert only_setting("best-static", tuned).initial_local_batch_size == 128
    assert tuned.is_fallback("mixed")
    assert not tuned.is_fallback("other")


def test_best_static_needs_a_choice() -> None:
    with pytest.raises(ValueError, match="dynamix tune"):
        only_setting("best-static")


def test_every_file_of_a_learned_policy_is_a_policy_seed(tmp_path: Path) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]))
    row = parse_contender("mine+track", {"mine": [str(file) for file in files]})
    settings = row.settings("mixed", Tuned())
    assert [setting.policy_file for setting in settings] == [str(file) for file in files]
    assert settings[0].policy_digest == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"  # of b"\0"
    assert settings[0].identity() != settings[1].identity()


def test_where_a_file_lies_does_not_matter(tmp_path: Path) -> None:
    identities = []
    for name in ("here", "there"):
        (tmp_path / name).write_bytes(b"policy")
        (setting,) = parse_contender("mine", {"mine": [str(tmp_path / name)]}).settings("mixed", Tuned())
        identities.append(setting.identity())
    assert identities[0] == identities[1]


def test_a_missing_policy_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"/nowhere/x\.safetensors: No such file"):
        parse_contender("mine", {"mine": ["/nowhere/x.safetensors"]}).settings("mixed", Tuned())


def test_shipped_files_belong_to_the_longest_name_they_bear(tmp_path: Path) -> None:
    for name in ("ppo-0", "ppo-1", "ppo-paper-0", "other"):
        (tmp_path / f"{name}.safetensors").touch()
    assert [file.stem for file in shipped_files("ppo", tmp_path)] == ["ppo-0", "ppo-1"]
    assert [file.stem for file in shipped_files("ppo-paper", tmp_path)] == ["ppo-paper-0"]


def test_baselines_the_null_the_default_and_the_learned_policies_are_always_shown() -> None:
    rows = with_references([parse_contender("doubling"), parse_contender("goodput")])
    assert [row.label for row in rows] == ["best-static", "random", "goodput", "rule", "ppo", "ppo-paper", "doubling"]
    assert DEFAULT_POLICY in [row.label for row in with_references([])]
    assert all(isinstance(row, Contender) for row in rows)


def test_a_policy_that_does_not_exist_is_answered_with_all_rows_there_are() -> None:
    with pytest.raises(
        ValueError, match="no policy is called 'rul': choose one of accordion, adacomm, best-static, "
    ) as error:
        parse_contender("rul")
    for name in ("ppo", "omnilearn", "oracle", "rule", "static"):
        assert f" {name}," in f"{error.value},"
