"""Suites: families, the control, digests."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import MIXED, write_suite

from dynamix.lab.simulator.scenario import (
    Congestion,
    Scenario,
    SpeedChange,
    Stragglers,
    Workers,
    digest_of,
    is_control,
    is_homogeneous,
    read_suite,
    suite_named,
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
