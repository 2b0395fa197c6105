"""
family = "made"
workload = "fashion-14-mlp"
target_accuracy = 0.8
fixed_time_s = 10
time_limit_s = 60.0

[network]
overlap = 0.25

[[workers]]
count = 2
samples_per_s = 4000

[[workers]]
samples_per_s = 500.0
max_local_batch_size = 48
"""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import MIXED, write_suite

from dynamix.lab.simulator.scenario import (
    Network,
    Scenario,
    Workers,
    digest_of,
    is_control,
    is_homogeneous,
    read_suite,
    scenarios_in,
    suite_named,
)
from dynamix.lab.workloads import OPTIMIZERS, WORKLOADS
from dynamix.trainer.gradient.learning_rate import FACTORS

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SMALLEST = """
family = "made"
workload = "fashion-14-mlp"
target_accuracy = 0.8
fixed_time_s = 10
time_limit_s = 60.0

[network]
overlap = 0.25

[[workers]]
count = 2
samples_per_s = 4000

[[workers]]
samples_per_s = 500.0
max_local_batch_size = 48
"""


def read(directory: Path, text: str, name: str = "one.toml") -> Scenario:
    file = directory / name
    file.write_text(text)
    return Scenario.read(file)


def test_a_file_gives_a_scenario_with_defaults_and_the_files_name(tmp_path: Path) -> None:
    scenario = read(tmp_path, SMALLEST)
    assert (scenario.name, scenario.family, scenario.world_size) == ("one", "made", 3)
    assert scenario.network == Network(overlap=0.25)
    assert scenario.workers[1] == Workers(samples_per_s=500.0, max_local_batch_size=48)
    assert [worker.samples_per_s for worker in scenario.per_worker] == [4000.0, 4000.0, 500.0]
    assert scenario.max_local_batch_sizes == (1024, 1024, 48)
    assert scenario.local_batch_sizes() == (64, 64, 48)
    assert scenario.stragglers is scenario.congestion is None


@pytest.mark.parametrize(
    ("line", "replacement", "complaint"),
    [
        ("overlap = 0.25", "overlapp = 0.25", "unknown key 'network.overlapp': did you mean overlap?"),
        ("count = 2", "number = 2", "unknown key 'workers[0].number': known are bandwidth_mbit_s, count, "),
        ("overlap = 0.25", "overlap = 1.25", "network.overlap = 1.25: expected `float` <= 1.0"),
        (
            "overlap = 0.25",
            "topology = 'star'",
            "network.topology = 'star': it must be one of 'ring', 'parameter-server'",
        ),
        ("overlap = 0.25", "latency_s = inf", "network.latency_s = inf: expected `float` <= 1e+308"),
        (
            "samples_per_s = 4000",
            "samples_per_s = '4k'",
            "workers[0].samples_per_s = '4k': expected `float`, got `str`",
        ),
        ("samples_per_s = 4000", "samples_per_s = 0", "workers[0].samples_per_s = 0: expected `float` > 0.0"),
        (
            "max_local_batch_size = 48",
            "max_local_batch_size = 0",
            "workers[1].max_local_batch_size = 0: expected `int` >= 1",
        ),
        ('family = "made"', "", "the key 'family' is missing"),
        ('family = "made"', 'family = "A family"', "'A family'"),
        ("fixed_time_s = 10", "fixed_time_s = 61", "fixed_time_s = 61: it must be between 0 and 60"),
        ("fixed_time_s = 10", "fixed_time_s = ", "not TOML"),
        (
            "fixed_time_s = 10",
            "fixed_time_s = 10\nevaluate_every_s = 1e-12",
            "evaluate_every_s = 1e-12: it must be at least 6e-05",
        ),
        ("target_accuracy = 0.8", "target_accuracy = 0.8\noptimizer = 'sgdm'", "one of 'sgd', 'adam', 'adamw'"),
        (
            "target_accuracy = 0.8",
            "target_accuracy = 0.8\ninitial_local_batch_size = 0",
            "initial_local_batch_size = 0: it must be between 1 and 1024",
        ),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_value(
    tmp_path: Path, line: str, replacement: str, complaint: str
) -> None:
    assert line in SMALLEST
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read(tmp_path, SMALLEST.replace(line, replacement, 1))
    assert str(caught.value).startswith(f"{tmp_path / 'one.toml'}: ")


def test_a_directory_without_scenarios_or_with_two_of_one_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no scenario"):
        scenarios_in(tmp_path)
    for name in ("a.toml", "b.toml"):
        read(tmp_path, f'name = "same"\n{SMALLEST}', name)
    with pytest.raises(ValueError, match="two scenarios of the name 'same'"):
        scenarios_in(tmp_path)


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_the_scenarios_that_we_ship_can_be_run(part: str) -> None:
    for scenario in scenarios_in(SCENARIOS / part):
        assert scenario.workload in WORKLOADS
        assert scenario.optimizer in OPTIMIZERS
        assert scenario.learning_rate_rule in FACTORS
        assert sum(len(node.ranks) for node in scenario.nodes) == scenario.world_size


def test_a_family_is_the_control_when_all_its_workers_are_alike_and_stay_alike(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, alike=4000, mixed=1000)
    (alike,), (mixed,) = suite.families["alike"], suite.families["mixed"]
    assert is_homogeneous(alike)
    assert not is_homogeneous(mixed)
    assert suite.heterogeneous_families == ["mixed"]
    assert not is_control([alike, mixed])


def test_the_digest_is_of_what_the_scenario_says_not_of_how_it_is_written(tmp_path: Path) -> None:
    text = MIXED.format(family="a", slow=500, learn="true")
    for name, content in (("one", text), ("two", "# a remark\n" + text), ("three", text.replace("0.5", "0.6"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.toml").write_text(content)
    one, two, three = (read_suite(tmp_path / name).scenarios[0] for name in ("one", "two", "three"))
    assert digest_of(one) == digest_of(two) != digest_of(three)


MEASURED = (
    *("name", "family", "learn", "target_accuracy", "fixed_time_s", "time_limit_s"),
    *("evaluate_every_s", "evaluation_samples", "noise_every"),
)
"""What a scenario says of how a run is called, judged and watched, not of what is run."""


def essence(scenario: Scenario) -> bytes:
    """Cluster and job alone."""
    about = msgspec.to_builtins(scenario)
    for name in MEASURED:
        del about[name]
    return msgspec.json.encode(about, order="sorted")


def pairs(same: Callable[[Scenario, Scenario], bool]) -> set[tuple[str, str]]:
    train, held_out = suite_named("train"), suite_named("heldout")
    return {(a.name, b.name) for a in train.scenarios for b in held_out.scenarios if same(a, b)}


def test_train_and_held_out_scenarios_never_meet() -> None:
    assert pairs(lambda a, b: essence(a) == essence(b)) == set()
