"""Chains of runs on one virtual cluster: cold each time, with a profile, with exploration, and on another cluster."""

import sys
from collections.abc import Sequence

import msgspec

from dynamix.arbitrator.policies.rule import Rule
from dynamix.lab.experiments.episodes.episode import Episode, run_episode
from dynamix.lab.experiments.episodes.pool import workload_data
from dynamix.lab.simulator.scenario import Scenario
from dynamix.schemas.messages import JobProfile
from dynamix.schemas.messages.allocation import Explored

EXPLORES: tuple[Explored, ...] = ("learning_rate", "noise_multiplier")
SLOWER, NARROWER = 0.5, 0.2
"""What a changed cluster has of its speeds, or of its links' rates."""


class ChangedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A second run on another cluster than the first one's."""

    change: str
    time_s: float
    cold_s: float
    noticed: int | None
    """Windows until the profile was dropped; `None`: it never was."""


class FamilyChain(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one family; times to the target in virtual seconds, a miss counted as the time limit."""

    scenario: str
    family: str
    seed: int
    cold_s: list[float]
    """Each run begins cold."""
    exploring_s: list[float]
    """The same seeds; each run begins with the profile, and explores."""
    second_s: float
    """The second run with a profile and no exploration."""
    arms: list[str]
    """What each exploring run tried, or `stopped`."""
    changed: list[ChangedCluster]


class ChainTask(msgspec.Struct, frozen=True, kw_only=True):
    """One chain, as a pool runs it."""

    scenario: Scenario
    seed: int
    num_runs: int
    explores: tuple[Explored, ...] = EXPLORES

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.scenario.name}, seed {self.seed}"


def run_chain(task: ChainTask) -> FamilyChain:
    """Run the chain, and the second run on changed clusters."""
    scenario, seeds = task.scenario, [1000 * task.seed + number for number in range(task.num_runs)]
    cold = [_run(scenario, seed) for seed in seeds]
    exploring: list[Episode] = []
    for seed in seeds:
        profile = exploring[-1].profile if exploring else None
        exploring.append(_run(scenario, seed, profile, family="bench", explores=task.explores))
    plain = _run(scenario, seeds[0], family="bench").profile
    second = _run(scenario, seeds[1], plain, family="bench")
    chain = FamilyChain(
        scenario=scenario.name,
        family=scenario.family,
        seed=task.seed,
        cold_s=[time_of(each) for each in cold],
        exploring_s=[time_of(each) for each in exploring],
        second_s=time_of(second),
        arms=[arm_of(each) for each in exploring],
        changed=[_on_changed(name, other, seeds[1], plain) for name, other in changed_clusters(scenario)],
    )
    sys.stderr.write(f"  {task.name}: {msgspec.json.encode(chain).decode()}\n")
    return chain


def time_of(episode: Episode) -> float:
    """Virtual seconds to the target; of a miss the time limit."""
    found = episode.time_to_target_s
    return episode.scenario.time_limit_s if found is None else found


def changed_clusters(scenario: Scenario) -> Sequence[tuple[str, Scenario]]:
    """The scenario on slower workers, and over slower links."""
    workers = tuple(
        msgspec.structs.replace(each, samples_per_s=SLOWER * each.samples_per_s) for each in scenario.workers
    )
    network = msgspec.structs.replace(scenario.network, bandwidth_mbit_s=NARROWER * scenario.network.bandwidth_mbit_s)
    return (
        ("half the speed", msgspec.structs.replace(scenario, workers=workers)),
        ("a fifth of the links", msgspec.structs.replace(scenario, network=network)),
    )


def _on_changed(change: str, scenario: Scenario, seed: int, profile: JobProfile | None) -> ChangedCluster:
    warm, cold = _run(scenario, seed, profile, family="bench"), _run(scenario, seed)
    dropped = [action.window for action in warm.actions if "dropped its profile" in action.reason]
    noticed = dropped[0] + 1 if dropped else None
    return ChangedCluster(change=change, time_s=time_of(warm), cold_s=time_of(cold), noticed=noticed)


def _run(
    scenario: Scenario,
    seed: int,
    profile: JobProfile | None = None,
    *,
    family: str = "",
    explores: tuple[Explored, ...] = (),
) -> Episode:
    data = workload_data(scenario.workload, None)
    return run_episode(scenario, Rule(), data=data, seed=seed, family=family, profile=profile, explores=explores)


def arm_of(episode: Episode) -> str:
    """What a run tried, or `stopped`."""
    reasons = [action.reason for action in episode.actions]
    if any("stopped trying" in reason for reason in reasons):
        return "stopped"
    rates = {action.rate_factor for action in episode.actions}
    noise = next((part for part in reasons[-1].split("; ") if "noise scale x" in part), "")
    return noise or (f"learning rate x {max(rates):.3g}" if rates != {1.0} else "first")
