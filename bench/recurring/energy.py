"""Runs compared by energy and by time: the same clusters and seeds, every worker with the same power."""

import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from bench.harness.command import BenchmarkReport, Target
from bench.harness.tables import formatted

from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.experiments.episodes.episode import Episode, run_episode
from dynamix.lab.experiments.episodes.pool import workload_data
from dynamix.lab.simulator.scenario import Power, Scenario
from dynamix.schemas.messages import JobProfile, Report
from dynamix.schemas.messages.allocation import Explored, Objective

from .chains import ChainTask, arm_of, time_of
from .means import GeometricMean, mean_of

POWER = Power(busy_w=300.0, idle_w=60.0)
"""About what a GPU of a data centre draws; the measured figures are for this ratio, which no setting was chosen by."""
NUM_LATER = 3
"""The last runs of a chain: what was tried out is over by then."""

COLUMNS = {
    "family": "{family}",
    "seed": "{seed}",
    "J, by time": "{by_time:.2f}",
    "J, by energy": "{by_energy:.2f}",
    "J, energy/time": "{energy:.2f}",
    "s, energy/time": "{time:.2f}",
    "by time": "{time_arms}",
    "by energy": "{energy_arms}",
}


class SpentRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run took to the scenario's held-out accuracy, or a miss to its time limit."""

    time_s: float
    energy_j: float
    arm: str


class EnergyChain(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one family under equal seeds: each cold, compared by time, and compared by energy."""

    scenario: str
    family: str
    seed: int
    cold: list[SpentRun]
    by_time: list[SpentRun]
    by_energy: list[SpentRun]


def run_energy_chain(task: ChainTask) -> EnergyChain:
    """Run the chain three ways."""
    scenario = with_power(task.scenario)
    seeds = [1000 * task.seed + number for number in range(task.num_runs)]
    chain = EnergyChain(
        scenario=scenario.name,
        family=scenario.family,
        seed=task.seed,
        cold=[_run(scenario, seed)[0] for seed in seeds],
        by_time=_explore(scenario, seeds, task.explores, "time"),
        by_energy=_explore(scenario, seeds, task.explores, "energy"),
    )
    sys.stderr.write(f"  {task.name}: {msgspec.json.encode(chain).decode()}\n")
    return chain


def with_power(scenario: Scenario) -> Scenario:
    """The scenario with what its workers draw."""
    return msgspec.structs.replace(scenario, power=(POWER,) * len(scenario.workers))


def _explore(
    scenario: Scenario, seeds: Sequence[int], explores: tuple[Explored, ...], objective: Objective
) -> list[SpentRun]:
    profile, found = None, []
    for seed in seeds:
        spent, profile = _run(scenario, seed, profile, family="bench", explores=explores, objective=objective)
        found.append(spent)
    return found


def _run(
    scenario: Scenario,
    seed: int,
    profile: JobProfile | None = None,
    *,
    family: str = "",
    explores: tuple[Explored, ...] = (),
    objective: Objective = "time",
) -> tuple[SpentRun, JobProfile | None]:
    times, joules = [0.0], [0.0]

    def add(reports: list[Report]) -> None:
        times.append(times[-1] + reports[0].totals.time_s)
        joules.append(joules[-1] + (reports[0].energy_j or 0.0))

    episode: Episode = run_episode(
        scenario,
        Rule(),
        data=workload_data(scenario.workload, None),
        seed=seed,
        family=family,
        profile=profile,
        explores=explores,
        objective=objective,
        on_window=add,
    )
    time_s = time_of(episode)
    return SpentRun(
        time_s=time_s, energy_j=round(float(np.interp(time_s, times, joules)), 1), arm=arm_of(episode)
    ), episode.profile


def energy_report(chains: Sequence[EnergyChain]) -> BenchmarkReport:
    """Means over all chains of what the later runs took, with the one target: no more energy than by time."""
    rows, ratios = [], []
    for chain in chains:
        found = {
            "by_time_over_cold": _ratio(chain.by_time, chain.cold, "energy_j"),
            "by_energy_over_cold": _ratio(chain.by_energy, chain.cold, "energy_j"),
            "energy": _ratio(chain.by_energy, chain.by_time, "energy_j"),
            "time": _ratio(chain.by_energy, chain.by_time, "time_s"),
            "all_energy": _ratio(chain.by_energy, chain.by_time, "energy_j", later=False),
        }
        ratios.append(found)
        named = {"by_time": found["by_time_over_cold"], "by_energy": found["by_energy_over_cold"]}
        arms = {"time_arms": _arms(chain.by_time), "energy_arms": _arms(chain.by_energy)}
        rows.append({"family": chain.family, "seed": chain.seed, **found, **named, **arms})
    means: dict[str, GeometricMean] = {name: mean_of([each[name] for each in ratios]) for name in ratios[0]}
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in means.items()]
    target = Target(name="energy of the later runs, by energy over by time", value=means["energy"].value, at_most=1.0)
    text = "\n".join([formatted(rows, COLUMNS), "", *lines])
    return BenchmarkReport({"power": POWER, "summary": means, "chains": chains}, text, [target])


def _ratio(ours: Sequence[SpentRun], theirs: Sequence[SpentRun], name: str, *, later: bool = True) -> float:
    """The sum over the later runs, or over all, over that of others under the same seeds."""
    first = -NUM_LATER if later else 0
    return float(sum(getattr(run, name) for run in ours[first:]) / sum(getattr(run, name) for run in theirs[first:]))


def _arms(runs: Sequence[SpentRun]) -> str:
    return ", ".join([*(run.arm for run in runs[1:3]), "then " + runs[-1].arm])
