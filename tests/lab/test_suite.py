"""Suites: families, the control, digests."""

from pathlib import Path

import msgspec
import pytest
from tests.support.small_suites import MIXED, write_suite

from dynamix.lab.suite import digest_of, is_control, is_homogeneous, read_suite, suite_named
from dynamix.trainer.virtual.scenario import Congestion, Stragglers, Workers


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


def test_what_is_no_suite_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no scenario"):
        read_suite(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"'hold-out'.*heldout or train"):
        suite_named("hold-out")


def test_train_and_held_out_scenarios_never_meet() -> None:
    train, held_out = suite_named("train"), suite_named("heldout")
    bare = [{digest_of(msgspec.structs.replace(s, name="")) for s in suite.scenarios} for suite in (train, held_out)]
    assert len(bare[0]) >= 1
    assert not bare[0] & bare[1]
