"""The trial of a learned policy: it must depend on its state, and be faster than the best constant on train scenarios.

Both are found on the surrogate. Passing proves little; failing means that nothing was learned.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from dynamix.arbitrator.learned.policy import Levers
from dynamix.arbitrator.learned.policy_file import Network, PolicyFile
from dynamix.arbitrator.learned.response import LEAST_DEPENDENCE, dependence, is_dead
from dynamix.lab.simulator.scenario import Scenario

from .surrogate import Array64, SurrogateJobs, play_deltas, play_levers

NUM_JOBS = 8
"""Jobs of each scenario and setting."""
MOST_WINDOWS = 400
LOCAL_BATCH_SIZES = (8, 16, 32, 48, 64, 96, 128, 256, 512)
EXCHANGES = ((1, 0), (1, 1), (2, 1), (4, 1), (8, 1))
"""Steps between averagings, and whether `int8`: those of the constants that are compared."""


class Trial(NamedTuple):
    """Result of a trial."""

    dependence: dict[str, float]
    """Share of decisions that another state changes, by group of inputs."""
    constant: str
    """The best constant over all scenarios, in words."""
    vs_constant: dict[str, float]
    """Time to the target over that of this constant, by scenario."""

    @property
    def mean_vs_constant(self) -> float:
        """The geometric mean over scenarios."""
        return float(np.exp(np.log(list(self.vs_constant.values())).mean()))

    @property
    def faults(self) -> list[str]:
        """Reasons why the policy fails, in sentences; empty if it passes."""
        found = []
        if is_dead(self.dependence):
            share = f"{self.dependence['all']:.1%} of decisions change with the state"
            found.append(f"it is dead: {share}, at least {LEAST_DEPENDENCE:.0%} must")
        if self.mean_vs_constant >= 1.0:
            found.append(f"it takes {self.mean_vs_constant:.2f} of the time of a constant: {self.constant}")
        return found


def tried(file: PolicyFile, scenarios: Sequence[Scenario], show: Callable[[str], None] = lambda _: None) -> Trial:
    """Try a policy in some scenarios; `show` is called with the name of each before it is tried."""
    levers, least = file.metadata.action_set == "levers", max(each.min_local_batch_size for each in scenarios)
    sizes = [size for size in LOCAL_BATCH_SIZES if size >= least]
    settings = list(product(sizes, EXCHANGES if levers else EXCHANGES[:1]))
    network, states, own, constants = Network(file), [], [], []
    for number, scenario in enumerate(scenarios):
        show(scenario.name)
        jobs = SurrogateJobs([scenario], NUM_JOBS, seed=number, spread=0.0)
        if levers:
            played = play_levers(jobs, network.choose, MOST_WINDOWS, until_target=True)
        else:
            played = play_deltas(jobs, network.choose, MOST_WINDOWS, None, until_target=True)
        states.append(played.inputs_TDI.reshape(-1, played.inputs_TDI.shape[-1]))
        own.append(_mean_s(jobs))
        constants.append(constant_times(scenario, settings, seed=number, tracks=levers))
    times_s = np.array(constants)
    best = int(np.log(times_s).mean(axis=0).argmin())
    size, (every, is_int8) = settings[best]
    words = [f"{size} samples per rank", f"an averaging every {every} steps" if every > 1 else "", "int8" * is_int8]
    ratios = {
        scenario.name: float(own_s / times[best])
        for scenario, own_s, times in zip(scenarios, own, times_s, strict=True)
    }
    return Trial(dependence(file, np.concatenate(states)), ", ".join(filter(None, words)), ratios)


def constant_times(
    scenario: Scenario, settings: Sequence[tuple[int, tuple[int, int]]], *, seed: int, tracks: bool
) -> Array64:
    """Time to the target of each setting; all run at once."""
    jobs = SurrogateJobs([scenario], NUM_JOBS * len(settings), seed=seed, spread=0.0)
    sizes, every, is_int8 = (
        np.repeat(np.array(column, dtype=np.float64), NUM_JOBS)
        for column in zip(*((size, *exchange) for size, exchange in settings), strict=True)
    )
    local = np.clip(np.repeat(sizes[:, None], jobs.num_ranks, axis=1), jobs.low, jobs.high)
    levers = Levers(local.sum(axis=1), every, is_int8).moved(np.zeros((len(sizes), 3), dtype=np.int64), jobs.facts)
    for _ in range(MOST_WINDOWS):
        jobs.run_window(local, levers, tracks=tracks)
        if not np.isnan(jobs.reached_s).any() or (jobs.time_s > scenario.time_limit_s).all():
            break
    return _mean_s(jobs, len(settings))


def _mean_s(jobs: SurrogateJobs, num_settings: int = 1) -> Array64:
    """Geometric mean of the times to the target; a miss counts as the time limit."""
    limit_s = jobs.scenarios[0].time_limit_s
    times_s = np.minimum(np.where(np.isnan(jobs.reached_s), limit_s, jobs.reached_s), limit_s)
    means: Array64 = np.exp(np.log(times_s).reshape(num_settings, -1).mean(axis=1))
    return means if num_settings > 1 else means[0]
