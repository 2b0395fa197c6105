"""Scenario files, and the suites that we ship."""

import re
from pathlib import Path

import msgspec
import pytest

from dynamix.lab.simulator.scenario import SUITES, Network, Scenario, Workers, digest_of, read_suite, suite_named
from dynamix.lab.workloads import OPTIMIZERS, WORKLOADS

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
    again, other = (read(tmp_path, text) for text in (f"# a remark\n{SMALLEST}", SMALLEST.replace("0.25", "0.3")))
    assert digest_of(scenario) == digest_of(again) != digest_of(other)


@pytest.mark.parametrize(
    ("line", "replacement", "complaint"),
    [
        ("overlap = 0.25", "overlapp = 0.25", "unknown field `overlapp` - at `$.network`"),
        ("samples_per_s = 4000", "samples_per_s = 0", "`float` > 0.0 - at `$.workers[0].samples_per_s`"),
        ("fixed_time_s = 10", "fixed_time_s = 61", "fixed_time_s = 61: it must be between 0 and 60"),
        ("fixed_time_s = 10", "fixed_time_s = ", "not TOML"),
    ],
)
def test_an_error_names_file_key_and_limit(tmp_path: Path, line: str, replacement: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read(tmp_path, SMALLEST.replace(line, replacement, 1))
    assert str(caught.value).startswith(f"{tmp_path / 'one.toml'}: ")


def test_a_directory_without_scenarios_or_with_two_of_one_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no scenario"):
        read_suite(tmp_path)
    for name in ("a.toml", "b.toml"):
        read(tmp_path, f'name = "same"\n{SMALLEST}', name)
    with pytest.raises(ValueError, match="two scenarios of the name 'same'"):
        read_suite(tmp_path)


@pytest.mark.parametrize("name", SUITES)
def test_shipped_scenarios_name_workloads_and_optimizers_that_exist(name: str) -> None:
    for scenario in suite_named(name).scenarios:
        assert scenario.workload in WORKLOADS
        assert scenario.optimizer in OPTIMIZERS
        assert sum(len(node.ranks) for node in scenario.nodes) == scenario.world_size


def test_train_and_held_out_scenarios_never_meet() -> None:
    """Not even under another name, or with another target."""
    judged = ("name", "family", "learn", "target_accuracy", "fixed_time_s", "time_limit_s")
    watched = ("evaluate_every_s", "evaluation_samples", "noise_every")

    def essence(scenario: Scenario) -> bytes:
        about = msgspec.to_builtins(scenario)
        for name in (*judged, *watched):
            del about[name]
        return msgspec.json.encode(about, order="sorted")

    train, held_out = (
        {essence(each) for name in SUITES if name.endswith(part) for each in suite_named(name).scenarios}
        for part in ("train", "heldout")
    )
    assert train.isdisjoint(held_out)
