"""docs/results.md says what the experiments' JSON says, and every experiment runs."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.image
import msgspec
import pytest
from bench.cluster.target import verdict
from bench.results import exchange, heldout, laboratory
from bench.results.__main__ import EXPERIMENTS, main
from bench.results.laboratory import SCALES, Laboratory
from bench.results.learned import ADAM
from bench.results.paper import resnet20, transformer, vgg11
from bench.results.result import (
    NOT_RUN,
    ExperimentResult,
    markdown,
    markers,
    mean_of,
    trend_of,
    write_table,
)
from tests.support.small_suites import made_up

from dynamix.lab.experiments.comparison import evaluation
from dynamix.lab.experiments.comparison.runs import RunTask
from dynamix.lab.experiments.comparison.scores import MeanInterval, RatioInterval
from dynamix.lab.experiments.comparison.tuned import Choice, Tuned, to_toml
from dynamix.lab.experiments.comparison.verdict import HeadlineRow, Verdict, VerdictFamily, VerdictRow
from dynamix.lab.experiments.episodes.suite import suite_named
from dynamix.lab.simulator.scenario import Scenario

FASHION_MNIST = Path(__file__).parents[2] / ".data" / "fashion-mnist"
DOCS = Path(__file__).parents[2] / "docs"
EMPTY = "\n".join("\n".join((markers(name)[0], NOT_RUN, markers(name)[1])) for name in EXPERIMENTS)


def read_result(path: Path) -> ExperimentResult:
    return msgspec.json.decode(path.read_bytes(), type=ExperimentResult)


def table_in(document: str, name: str) -> str:
    begin, end = markers(name)
    return document.partition(begin)[2].partition(end)[0].strip("\n")


def made(rows: list[list[MeanInterval | str | int | float | None]], columns: list[str]) -> ExperimentResult:
    return ExperimentResult(
        name="static",
        command="python -m bench.results --only static",
        scale="reduced",
        seeds=[0, 1, 2],
        policy_seeds=[0, 5],
        columns=columns,
        rows=rows,
        notes=["A note."],
        code="",
        versions={},
    )


@pytest.mark.parametrize("name", [*EXPERIMENTS, verdict.NAME])
def test_the_page_holds_the_table_that_the_json_makes(name: str) -> None:
    path = DOCS / "results" / f"{name}.json"
    expected = markdown(read_result(path)) if path.exists() else NOT_RUN
    assert table_in((DOCS / "results.md").read_text(), name) == expected


def test_the_page_holds_the_held_out_comparison_that_the_json_makes() -> None:
    assert table_in((DOCS / "results.md").read_text(), heldout.TABLE.name) == heldout.TABLE.expected(DOCS)


def test_the_page_holds_the_comparison_of_exchanges_that_the_json_makes() -> None:
    assert table_in((DOCS / "results.md").read_text(), exchange.TABLE.name) == exchange.TABLE.expected(DOCS)


@pytest.mark.parametrize(
    ("family", "exact", "static", "missed"),
    [
        ("slow-links", 0.60, (0.90, 0.8, 1.1), []),
        ("slow-links", 0.61, (0.91, 0.8, 1.1), ["above 0.60 of exact gradients", "above 0.90 of static"]),
        ("congestion", 0.59, (1.2, 0.99, 1.4), []),
        ("congestion", 0.59, (1.2, 1.01, 1.4), ["slower than static"]),
        ("alike", 1.02, (1.0, 0.9, 1.1), []),
        ("alike", 1.03, (1.0, 0.9, 1.1), ["above 1.02 of exact gradients"]),
    ],
)
def test_the_default_policy_is_held_to_its_limits_by_family(
    family: str, exact: float, static: tuple[float, float, float], missed: list[str]
) -> None:
    found = exchange.misses(family, RatioInterval(exact, None, None), [RatioInterval(*static)])
    assert found == missed
    assert exchange.misses(family, None, []) == ["not measured"]


def test_exchanges_are_compared_with_every_base_in_every_family() -> None:
    bases = {"rule/exchange=exact": RatioInterval(0.5, 0.4, 0.6), "static": RatioInterval(0.75, 0.7, 0.8)}
    row = msgspec.structs.replace(row_of("rule", 0.4), against=bases)
    family = VerdictFamily(control=False, scenarios={}, best_static_local_batch_size=None, chosen_on="", policies=[row])
    verdict = verdict_of(families={"slow-links": family}, policies=[row], against=list(bases))
    lines = exchange.TABLE.text(verdict).splitlines()
    assert "| slow-links | 0.50 [0.40, 0.60] | 0.75 [0.70, 0.80] | yes |" in lines
    place = lines.index("Time to target over that of `static`:")
    assert lines[place + 2 : place + 5] == ["| policy | slow-links |", "|---|---|", "| `rule` | 0.75 [0.70, 0.80] |"]


def test_every_row_of_the_verdict_stands_in_the_table_per_family() -> None:
    labels = ["best-static", "goodput+track", "noise-scale", "doubling", "static", "rule"]
    ratios = {label: 0.5 + number for number, label in enumerate(labels)}
    rows = [row_of(label, ratio) for label, ratio in ratios.items()]
    families = {
        name: VerdictFamily(
            control=name == "alike",
            scenarios={},
            best_static_local_batch_size=128,
            chosen_on="train scenarios of the family",
            policies=rows,
        )
        for name in ("mixed", "alike")
    }
    verdict = verdict_of(families=families, policies=rows)
    lines = heldout.TABLE.text(verdict).partition("Per family")[2].splitlines()
    assert lines[2:10] == [
        "| policy | mixed | alike (control) |",
        "|---|---|---|",
        "| `best-static` | 1 (size 128) | 1 (size 128) |",
        *(f"| `{label}` | {ratio:.2f} | {ratio:.2f} |" for label, ratio in list(ratios.items())[1:]),
    ]


def test_the_headline_stands_first_with_both_intervals_and_the_control() -> None:
    both = RatioInterval(ratio=0.39, low=0.36, high=0.42, family_low=0.28, family_high=0.55)
    found = HeadlineRow(
        against="omnilearn", all_families=both, heterogeneous=None, control=RatioInterval(1.0, 0.9, 1.1)
    )
    rule = msgspec.structs.replace(row_of("rule", 0.4), accuracy_at_equal_samples=0.8125)
    verdict = verdict_of(families={}, policies=[rule], headline=[found], core_minutes=90.4)
    lines = heldout.TABLE.text(verdict).splitlines()
    assert lines[0].startswith("Time to target of `rule` over that of each baseline")
    assert lines[2:5] == [
        "| against | all families | heterogeneous families | control |",
        "|---|---|---|---|",
        "| `omnilearn` | 0.39 [0.36, 0.42] {0.28, 0.55} | - | 1.00 [0.90, 1.10] |",
    ]
    assert "| `rule` | 1.0 | 0 | 0.40 | - | - | 2 | 0.812 |" in lines
    assert "`dynamix evaluate` (90 minutes of a core)" in lines


def verdict_of(**fields: Any) -> Verdict:
    """A verdict over the family `mixed`."""
    return Verdict(
        suite="heldout",
        default_policy="rule",
        heterogeneous_families=["mixed"],
        seeds=[0, 1],
        num_runs_missing=0,
        command="dynamix evaluate",
        policy_files={},
        tuned_on="",
        code="",
        versions={},
        **fields,
    )


def row_of(label: str, ratio: float) -> VerdictRow:
    return VerdictRow(
        policy=label,
        median_time_to_target_s=1.0,
        misses=0,
        vs_best_static=RatioInterval(ratio=ratio, low=None, high=None),
        vs_goodput=None,
        num_runs=2,
        num_policy_seeds=1,
        accuracy_at_fixed_time=None,
        test_accuracy=None,
        relative_spread=None,
    )


def test_a_result_is_a_table_with_its_seeds_command_and_notes() -> None:
    rows: list[list[MeanInterval | str | int | float | None]] = [
        ["static@64", 7, 12.345, MeanInterval(0.5, 0.4567, 0.61), None],
        ["rule", 0, 1234.5, MeanInterval(2.0, None, None), "0 of 3"],
    ]
    assert markdown(made(rows, ["policy", "missed", "s", "ratio", "more"])).splitlines() == [
        "| policy | missed | s | ratio | more |",
        "|---|---|---|---|---|",
        "| static@64 | 7 | 12.3 | 0.500 [0.457, 0.610] | - |",
        "| rule | 0 | 1234 | 2.00 | 0 of 3 |",
        "",
        "Seeds 0 to 2, learning seeds 0, 5; brackets: 95 % interval. `python -m bench.results --only static`",
        "",
        "A note.",
    ]


def test_a_mean_has_students_interval() -> None:
    found = mean_of([1.0, 2.0, 3.0])  # standard error 1 / sqrt(3), t(2) = 4.303
    assert found.value == 2.0
    assert found.low == pytest.approx(2.0 - 4.303 / 3**0.5, abs=1e-3)
    assert mean_of([4.0]) == MeanInterval(4.0, None, None)


def test_a_table_goes_between_its_own_markers_and_twice_is_once(tmp_path: Path) -> None:
    document = tmp_path / "results.md"
    document.write_text(EMPTY)
    write_table(document, "adam", "| a |")
    once = document.read_text()
    assert table_in(once, "adam") == "| a |"
    assert table_in(once, "static") == NOT_RUN
    write_table(document, "adam", "| a |")
    assert document.read_text() == once
    with pytest.raises(ValueError, match="no place for the table: it needs the lines <!-- weather"):
        write_table(document, "weather", "")


def test_the_clusters_learn_at_the_rates_of_the_scenarios_with_gradients_of_the_images_model(tmp_path: Path) -> None:
    full = Laboratory(SCALES["full"], tmp_path)
    for name, job in {"mixed-8": full.cluster("sgd"), "adam-8": full.cluster("adam", **ADAM)}.items():
        scenario = next(found for found in suite_named("train").scenarios if found.name == name)
        assert (job.optimizer, job.learning_rate) == (scenario.optimizer, scenario.learning_rate)
        assert job.base_global_batch_size == scenario.base_global_batch_size
    assert full.image_job("images").network.gradient_bytes == 0


def test_baselines_run_with_tuned_settings_and_notes_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory, "scenario_root", lambda: tmp_path)
    rows = ["static@64", "random", "goodput"]
    assert "Nothing was tuned" in Laboratory(SCALES["smoke"], tmp_path).tuning_note(rows)
    choice = Choice(setting="goodput:smoothing=0.5", options={"smoothing": 0.5})
    tuned = Tuned(overall={"goodput": choice}, families={"home": {"goodput": Choice(options={"smoothing": 1.0})}})
    (tmp_path / "tuned.toml").write_text(to_toml(tuned))
    monkeypatch.setattr(evaluation, "outcomes", made_up(lambda task: task.setting.options.get("smoothing", 1.0)))
    known = Laboratory(SCALES["smoke"], tmp_path)
    table = known.compare([known.cluster("home")], rows)
    assert table.times("goodput", ["home"]).tolist() == [[[0.5, 0.5]]]
    assert known.tuning_note(rows) == (
        "Chosen over all train scenarios by `dynamix tune`: `goodput` as `goodput:smoothing=0.5`."
    )


def test_a_command_says_how_many_seeds_where_it_is_not_the_scales_number(tmp_path: Path) -> None:
    few = Laboratory(SCALES["smoke"]._replace(num_seeds=3), tmp_path)
    assert few.result("static", [], []).command.endswith("--scale smoke --seeds 3")
    assert Laboratory(SCALES["smoke"], tmp_path).result("static", [], []).command.endswith("--scale smoke")


def test_the_papers_models_are_trained_in_full_with_gradients_of_their_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = {None: 4.0, 32: 8.0, 64: 16.0, 128: 32.0}
    jobs: dict[str, Scenario] = {}
    references = Counter[str]()

    def run(task: RunTask) -> float:
        jobs[task.scenario.workload] = task.scenario
        references[task.scenario.workload] += task.seed == 100
        return times_s[task.initial_local_batch_size]

    monkeypatch.setattr(evaluation, "outcomes", made_up(run))
    monkeypatch.setattr(Laboratory, "check_data", lambda *_: None)  # CIFAR-10 is not everywhere
    place = Laboratory(SCALES["reduced"]._replace(num_seeds=1), tmp_path)
    for name, experiment in (("paper-vgg11", vgg11), ("paper-resnet20", resnet20), ("paper-transformer", transformer)):
        found = experiment(place)
        assert found.command == f"python -m bench.results --only {name} --scale reduced --seeds 1"
        assert [[row[0], row[-1]] for row in found.rows] == [
            ["static@32", MeanInterval(pytest.approx(0.5), None, None)],
            ["static@64", MeanInterval(pytest.approx(1.0), None, None)],
            ["static@128", MeanInterval(pytest.approx(2.0), None, None)],
            ["rule", MeanInterval(pytest.approx(0.25), None, None)],
        ]
    assert references == {"cifar10-vgg11": 1, "cifar10-resnet20": 1, "text-transformer": 1}
    for job in jobs.values():
        assert (job.world_size, job.initial_local_batch_size) == (8, 64)
        assert (job.num_train_samples, job.network.gradient_bytes) == (0, 0)
        assert job.target_accuracy == 0.5  # the last one of the run that sets it


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("paper-vgg11", "none", "CIFAR-10 is missing: no data_batch_1.bin"),
        ("transfer", str(FASHION_MNIST), "no text to learn from"),
    ],
)
def test_missing_data_end_an_experiment_before_its_first_run(
    name: str, data: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--output", str(tmp_path / "docs"), "--work", str(tmp_path / "work"), "--data", data]
    assert main(["--only", name, *places]) == 2
    assert capsys.readouterr().err.startswith(f"{name}: {sentence}")
    assert list((tmp_path / "work" / "reduced").iterdir()) == []


def test_a_trend_is_that_of_the_straight_line_through_all_values() -> None:
    found = trend_of([1.0, 3.0, 2.0, 4.0], per=10)  # slope 0.8, sum of squares 1.8 about it, t(2) = 4.303
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((8.0, 8 - 18.255, 8 + 18.255), abs=2e-3)
    assert trend_of([1.0, 2.0]) is None


def test_an_experiment_runs_and_writes_its_table_numbers_and_picture(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(EMPTY)
    places = ["--output", str(tmp_path / "docs"), "--work", str(tmp_path / "work")]
    assert main(["--only", "static", "--only", "learning", "--scale", "smoke", "--jobs", "1", *places]) == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    static = read_result(tmp_path / "docs" / "results" / "static.json")
    assert [row[0] for row in static.rows] == ["static@32", "static@64", "static@128", "rule"]
    assert static.rows[1][-1] == MeanInterval(1.0, 1.0, 1.0)
    learning = read_result(tmp_path / "docs" / "results" / "learning.json")
    assert [len(curve.points) for curve in learning.panels[0].curves] == [2]
    for name, result in (("static", static), ("learning", learning)):
        assert table_in(page, name) == markdown(result)
        pixels = matplotlib.image.imread(tmp_path / "docs" / "results" / f"{name}.png")
        assert pixels.std() > 0.05
    assert len(re.findall(NOT_RUN, page)) == len(EXPERIMENTS) - 2
