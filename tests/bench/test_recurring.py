import math
from pathlib import Path

import msgspec
import pytest
from bench.harness.command import BenchmarkError
from bench.recurring import chains, energy
from bench.recurring.__main__ import report_of, tasks_of
from bench.recurring.chains import ChainTask, ChangedCluster, FamilyChain, changed_clusters, run_chain
from bench.recurring.energy import EnergyChain, SpentRun, energy_report, run_energy_chain
from bench.recurring.kept import KeptChains
from bench.recurring.means import mean_of
from bench.recurring.tables import ChainFigures, EnergyFigures, explored_table, families_table, means_table
from tests.support import virtual

from dynamix.lab.experiments.episodes.pool import EpisodePool
from dynamix.lab.workloads import Data

DOCS = Path(__file__).parents[2] / "docs"


def chain(**changes: object) -> FamilyChain:
    fields = {
        "scenario": "mixed-8",
        "family": "mixed",
        "seed": 1,
        "cold_s": [10.0, 10.0, 10.0, 10.0],
        "exploring_s": [10.0, 8.0, 6.0, 4.0],
        "second_s": 9.0,
        "arms": ["first", "learning rate x 1.5", "stopped", "learning rate x 1.5"],
        "changed": [
            ChangedCluster(change="half the speed", time_s=10.2, cold_s=10.0, noticed=2),
            ChangedCluster(change="a fifth of the links", time_s=10.0, cold_s=10.0, noticed=None),
        ],
    }
    return FamilyChain(**(fields | changes))  # type: ignore[arg-type]


def test_ratios_are_of_runs_under_the_same_seed() -> None:
    report = report_of([chain(), chain(second_s=10.0)])
    values = {target.name: target.value for target in report.targets}
    assert values == {
        "second run over a cold one": pytest.approx(math.sqrt(0.9)),
        "second run that explores over a cold one": pytest.approx(0.8),
        "all runs over cold ones": pytest.approx(0.7),
        "second run on a changed cluster over a cold one": pytest.approx(math.sqrt(1.02)),
        "windows until the last noticed change": 2,
    }
    assert "1.02 (2)" in report.text
    assert "1.00 (never)" in report.text


def test_a_mean_knows_its_error() -> None:
    mean = mean_of([math.exp(0.1), math.exp(-0.1)])
    assert (mean.value, mean.error, mean.count) == (pytest.approx(1.0), pytest.approx(0.1), 2)


def test_a_chain_is_run_on_the_cluster_and_on_changed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    data: Data = virtual.data()
    monkeypatch.setattr(chains, "workload_data", lambda *_: data)
    scenario = virtual.scenario(name="small", target_accuracy=0.4, fixed_time_s=1.5)
    assert [other.workers[0].samples_per_s for _, other in changed_clusters(scenario)] == [2000.0, 4000.0]
    found = run_chain(ChainTask(scenario=scenario, seed=1, num_runs=2))
    assert found.cold_s[0] == found.exploring_s[0]
    assert len(found.exploring_s) == len(found.arms) == 2
    assert [each.change for each in found.changed] == ["half the speed", "a fifth of the links"]
    assert found.changed[0].noticed in (2, 3)


def spent(*runs: tuple[float, float]) -> list[SpentRun]:
    return [SpentRun(time_s=time_s, energy_j=energy_j, arm="first") for time_s, energy_j in runs]


def test_energy_is_that_of_the_last_three_runs_under_the_same_seeds() -> None:
    chain = EnergyChain(
        scenario="mixed-8",
        family="mixed",
        seed=1,
        cold=spent((9.0, 90.0), *[(10.0, 100.0)] * 3),
        by_time=spent((9.0, 90.0), *[(8.0, 100.0)] * 3),
        by_energy=spent((9.0, 90.0), (10.0, 60.0), (10.0, 80.0), (10.0, 70.0)),
    )
    report = energy_report([chain])
    means = {name: mean.value for name, mean in report.figures["summary"].items()}
    assert means == {
        "by_time_over_cold": pytest.approx(1.0),
        "by_energy_over_cold": pytest.approx(0.7),
        "energy": pytest.approx(0.7),
        "time": pytest.approx(1.25),
        "all_energy": pytest.approx(300 / 390),
    }
    assert report.targets[0].met


def test_a_chain_by_energy_begins_as_one_by_time_and_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    data: Data = virtual.data()
    monkeypatch.setattr(energy, "workload_data", lambda *_: data)
    scenario = virtual.scenario(name="small", target_accuracy=0.4, fixed_time_s=1.5)
    found = run_energy_chain(ChainTask(scenario=scenario, seed=1, num_runs=2))
    assert found.cold[0] == found.by_time[0] == found.by_energy[0]
    assert 4 * 60.0 * found.cold[0].time_s < found.cold[0].energy_j < 4 * 300.0 * found.cold[0].time_s


def test_what_runs_try_out_is_named() -> None:
    tasks = tasks_of("train", "adam,gpu", "noise_multiplier", 3, 2)
    assert [(task.scenario.family, task.seed, task.explores) for task in tasks] == [
        (family, seed, ("noise_multiplier",)) for seed in (1, 2) for family in ("adam", "gpu")
    ]
    with pytest.raises(BenchmarkError, match="--explores 'batch': name some of learning_rate, noise_multiplier"):
        tasks_of("train", "", "batch", 3, 1)
    with pytest.raises(BenchmarkError, match="--families 'none'"):
        tasks_of("train", "none", "learning_rate", 3, 1)


def test_a_measurement_goes_on_with_the_chains_that_are_not_in_its_file(tmp_path: Path) -> None:
    tasks, asked = tasks_of("train", "adam,gpu", "noise_multiplier", 3, 1), list[str]()

    def made_up(task: ChainTask) -> FamilyChain:
        asked.append(task.name)
        return chain(family=task.scenario.family)

    with EpisodePool(1) as pool:
        first = KeptChains(FamilyChain, tmp_path / "kept.jsonl").run_all(pool, made_up, tasks[1:])
        both = KeptChains(FamilyChain, tmp_path / "kept.jsonl").run_all(pool, made_up, tasks)
        longer = tasks_of("train", "gpu", "noise_multiplier", 4, 1)
        KeptChains(FamilyChain, tmp_path / "kept.jsonl").run_all(pool, made_up, longer)
    assert [each.family for each in both] == ["adam", "gpu"]
    assert both[1:] == first
    assert asked == ["gpu-8, seed 1", "adam-8, seed 1", "gpu-8, seed 1"]  # a longer chain is another one
    (tmp_path / "other.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(BenchmarkError, match=r"other\.jsonl, line 1, is no chain: .*; name another file"):
        KeptChains(FamilyChain, tmp_path / "other.jsonl")


def test_the_tables_say_which_targets_are_met_and_by_how_much() -> None:
    chains = [chain(second_s=9.4), chain(second_s=9.5, exploring_s=[10.0, 9.9, 9.9, 9.9])]
    report = report_of(chains)
    figures = ChainFigures(summary=report.figures["summary"], targets=[*report.targets], chains=chains)
    assert means_table(figures).splitlines()[2:] == [
        "| second run, no exploration | 0.94 | 1.01 | 0.95, met |",
        "| second run that explores | 0.89 | 1.11 | 0.95, met, by less than the error |",
        "| all runs in a row | 0.83 | 1.19 | 0.90, met, by less than the error |",
        "| second run on a changed cluster | 1.01 | 1.01 | 1.02, met |",
    ]
    assert families_table(chains).splitlines()[2:] == ["| mixed | 0.94 | 0.89 | 0.83 | 0.77 | 2: learning rate x 1.5 |"]


def test_the_page_holds_what_the_figures_say_is_worth_trying_out() -> None:
    files = {
        "learning rate and noise scale ([file](recurring-energy.json))": "recurring-energy.json",
        "the noise scale only ([file](recurring-energy-noise.json))": "recurring-energy-noise.json",
    }
    figures = {
        title: msgspec.json.decode((DOCS / name).read_bytes(), type=EnergyFigures) for title, name in files.items()
    }
    assert explored_table(figures) in (DOCS / "recurring.md").read_text()


def test_the_page_holds_the_held_out_tables_that_the_figures_make() -> None:
    figures = msgspec.json.decode((DOCS / "recurring-heldout.json").read_bytes(), type=ChainFigures)
    page = (DOCS / "recurring.md").read_text()
    assert means_table(figures) in page
    assert families_table(figures.chains) in page
