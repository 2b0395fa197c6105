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
    TABLES,
    Congestion,
    Network,
    Scenario,
    SpeedChange,
    Stragglers,
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
        ("overlap = 0.25", "overlap = 1.25", "network.overlap = 1.25: it must be between 0 and 1"),
        (
            "overlap = 0.25",
            "topology = 'star'",
            "network.topology = 'star': it must be one of 'ring', 'parameter-server'",
        ),
        ("overlap = 0.25", "latency_s = inf", "network.latency_s = inf: it must be a finite number"),
        (
            "samples_per_s = 4000",
            "samples_per_s = '4k'",
            "workers[0].samples_per_s = '4k': expected `float`, got `str`",
        ),
        ("samples_per_s = 4000", "samples_per_s = 0", "workers.samples_per_s = 0: it must be above 0"),
        (
            "max_local_batch_size = 48",
            "max_local_batch_size = 0",
            "workers.max_local_batch_size = 0: it must be at least 1",
        ),
        ('family = "made"', "", "the key 'family' is missing"),
        ('family = "made"', 'family = "A family"', "'A family'"),
        ("target_accuracy = 0.8", "target_accuracy = 80", "target_accuracy = 80: it must be between 0 and 1"),
        ("fixed_time_s = 10", "fixed_time_s = 61", "fixed_time_s = 61: it must be between 0 and 60"),
        ("fixed_time_s = 10", "fixed_time_s = ", "not TOML"),
        ("target_accuracy = 0.8", "target_accuracy = 0.8\nlable_noise = 0.1", "did you mean label_noise?"),
        ("target_accuracy = 0.8", "target_accuracy = 0.8\nwindow_steps = 0", "window_steps = 0: it must be at least 1"),
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


CHANGES = (
    SMALLEST
    + """
[[speed_changes]]
rank = 2
at_s = 5
factor = 3.5

[[speed_changes]]
rank = 2
at_s = 8
factor = 0.5
exchange_s = 0.01
"""
)


def test_a_worker_may_change_its_speed_and_change_it_again(tmp_path: Path) -> None:
    first, second = read(tmp_path, CHANGES).speed_changes
    assert first == SpeedChange(rank=2, at_s=5.0, factor=3.5)
    assert (second.at_s, second.factor, second.exchange_s) == (8.0, 0.5, 0.01)


@pytest.mark.parametrize(
    ("line", "replacement", "complaint"),
    [
        ("rank = 2", "rank = 3", "speed_changes.rank = 3: it must be between 0 and 2"),
        ("rank = 2", "rank = -1", "speed_changes.rank = -1: it must be at least 0"),
        ("factor = 3.5", "factor = 0", "speed_changes.factor = 0: it must be above 0"),
        ("factor = 3.5", "factor = -2", "speed_changes.factor = -2: it must be above 0"),
        ("factor = 3.5", "", "the key 'speed_changes[0].factor' is missing"),
        ("factor = 3.5", "factr = 3.5", "unknown key 'speed_changes[0].factr': did you mean factor?"),
        ("at_s = 5", "at_s = -5", "speed_changes.at_s = -5: it must be at least 0"),
        ("at_s = 5", "at_s = 8", "speed_changes: rank 2 changes twice at 8 s: remove one of them"),
        ("exchange_s = 0.01", "exchange_s = nan", "speed_changes.exchange_s = nan: it must be a finite number"),
    ],
)
def test_a_change_of_speed_that_cannot_be_is_refused(
    tmp_path: Path, line: str, replacement: str, complaint: str
) -> None:
    assert line in CHANGES
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read(tmp_path, CHANGES.replace(line, replacement, 1))


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("c.toml", "a.toml", "b.toml"):
        read(tmp_path, SMALLEST, name)
    assert [scenario.name for scenario in scenarios_in(tmp_path)] == ["a", "b", "c"]


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


def test_changing_a_scenario_in_code_checks_it_again(tmp_path: Path) -> None:
    scenario = read(tmp_path, SMALLEST)
    assert msgspec.structs.replace(scenario, learning_rate_rule="linear").learning_rate_rule == "linear"
    with pytest.raises(ValueError, match="label_noise = 2"):
        msgspec.structs.replace(scenario, label_noise=2.0)


def test_power_is_of_each_table_of_workers_and_older_digests_stay(tmp_path: Path) -> None:
    scenario = read(tmp_path, SMALLEST)
    assert "power" not in scenario.content
    text = SMALLEST + "[[power]]\nbusy_w = 300.0\n[[power]]\nbusy_w = 90.0\nidle_w = 9.0\n"
    known = read(tmp_path, text)
    assert [(each.busy_w, each.idle_w) for each in known.power_per_worker] == [(300.0, 0.0)] * 2 + [(90.0, 9.0)]
    assert "power" in known.content
    with pytest.raises(ValueError, match=r"1 tables \[\[power\]\] for 2 tables \[\[workers\]\]: one for each, or none"):
        msgspec.structs.replace(known, power=known.power[:1])


def test_the_readme_describes_every_key_with_its_default_and_no_other() -> None:
    text = (SCENARIOS / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", text, re.MULTILINE)
    expected = []
    for struct in (Scenario, *TABLES.values()):
        for field in msgspec.structs.fields(struct):
            if struct is Scenario and field.name in TABLES:
                continue
            expected.append((field.name, "required" if field.required else _written(field.default)))
    assert sorted(rows) == sorted(expected)


def _written(default: object) -> str:
    if default is None:
        return "-"
    return (
        f"`{str(default).lower()}`"
        if isinstance(default, bool)
        else f'`"{default}"`'
        if isinstance(default, str)
        else f"`{default:g}`"
    )


def test_scenarios_are_grouped_by_family(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, b=1000, a=500)
    assert list(suite.families) == ["a", "b"]
    assert [scenario.name for scenario in suite.families["a"]] == ["a-2"]
    assert suite.name == tmp_path.name


def test_a_family_is_the_control_when_all_its_workers_are_alike_and_stay_alike(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, alike=4000, mixed=1000)
    (alike,), (mixed,) = suite.families["alike"], suite.families["mixed"]
    assert is_homogeneous(alike)
    assert not is_homogeneous(mixed)
    assert suite.heterogeneous_families == ["mixed"]
    assert not is_control([alike, mixed])


@pytest.mark.parametrize(
    ("change", "control"),
    [
        ({"stragglers": Stragglers(factor=1.0, jitter=0.1)}, True),
        ({"stragglers": Stragglers(factor=2.0)}, False),
        ({"congestion": Congestion(factor=1.0)}, True),
        ({"congestion": Congestion(factor=4.0)}, False),
        ({"speed_changes": (SpeedChange(rank=0, at_s=1.0, factor=2.0),)}, False),
        ({"workers": (Workers(samples_per_s=1.0, count=3),)}, True),
        ({"workers": (Workers(samples_per_s=1.0), Workers(samples_per_s=1.0, bandwidth_mbit_s=10.0))}, False),
    ],
)
def test_jitter_is_no_disturbance_and_all_else_is(change: dict[str, object], control: bool, tmp_path: Path) -> None:
    (scenario,) = write_suite(tmp_path, alike=4000).scenarios
    assert is_homogeneous(msgspec.structs.replace(scenario, **change)) is control


def test_the_digest_is_of_what_the_scenario_says_not_of_how_it_is_written(tmp_path: Path) -> None:
    text = MIXED.format(family="a", slow=500, learn="true")
    for name, content in (("one", text), ("two", "# a remark\n" + text), ("three", text.replace("0.5", "0.6"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.toml").write_text(content)
    one, two, three = (read_suite(tmp_path / name).scenarios[0] for name in ("one", "two", "three"))
    assert digest_of(one) == digest_of(two) != digest_of(three)


def test_the_digest_is_as_it_was_before_speeds_could_change(tmp_path: Path) -> None:
    (scenario,) = write_suite(tmp_path, mixed=1000).scenarios
    assert digest_of(scenario) == "f8e6bccd9be1881bc3eefec0c481c54f2f47dd1962b8436fe44b8ca973b44190"
    changed = msgspec.structs.replace(scenario, speed_changes=(SpeedChange(rank=0, at_s=1.0, factor=2.0),))
    assert digest_of(changed) != digest_of(scenario)


def test_what_is_no_suite_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no scenario"):
        read_suite(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"'hold-out'.*heldout or train"):
        suite_named("hold-out")


MEASURED = (
    *("name", "family", "learn", "target_accuracy", "fixed_time_s", "time_limit_s"),
    *("evaluate_every_s", "evaluation_samples", "noise_every"),
)
"""What a scenario says of how a run is called, judged and watched, not of what is run."""
SAME_CLUSTER = {("mixed-8", "adam")}
"""Train and held-out scenarios on the same cluster; this pair's optimizers differ, which is the family's point."""


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


def test_a_scenario_that_is_only_called_or_judged_otherwise_is_the_same() -> None:
    (scenario, *_) = suite_named("train").scenarios
    renamed = msgspec.structs.replace(scenario, name="x", family="y", target_accuracy=0.1, time_limit_s=1e3)
    assert digest_of(renamed) != digest_of(scenario)
    assert essence(renamed) == essence(scenario)
    assert essence(msgspec.structs.replace(scenario, learning_rate=1.0)) != essence(scenario)


def test_clusters_that_serve_for_train_and_held_out_are_known() -> None:
    def same_cluster(a: Scenario, b: Scenario) -> bool:
        return (a.workers, a.network, a.stragglers, a.congestion) == (b.workers, b.network, b.stragglers, b.congestion)

    assert pairs(same_cluster) == SAME_CLUSTER
