"""Runs that are compared by energy: `rule` and the profiles between them, on a made cluster."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.deciding.profiles import profile_after
from dynamix.arbitrator.policies.exploration import Exploration
from dynamix.arbitrator.policies.policy import Array32, Array64, Decision
from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas.codec import decode, encode
from dynamix.schemas.features import GLOBAL_INDEX
from dynamix.schemas.messages import Job, JobProfile
from dynamix.schemas.messages.allocation import Objective
from dynamix.schemas.subjects import subject_of

NUM_WINDOWS = 24
GAINS_AND_JOULES = {1.0: (1.0, 50.0), 1.5: (1.3, 100.0), 2.25: (1.0, 200.0), 1 / 1.5: (0.9, 30.0)}
"""By the factor on the learning rate: how fast the held-out error falls, and what a window takes. The greatest gain has
1.5, which takes 1.54 times as much energy as the first arm; two thirds of the rate are slowest and take least."""


@dataclass
class Progressing(ToyCluster):
    """A cluster whose held-out error falls with each window, at the cost of some joules."""

    gain: float = 1.0
    window_j: float = math.nan
    window: int = 0

    def observe(self, sizes: Array64, job: Job, decided: tuple[int, ...]) -> tuple[Array32, Array32]:
        obs_WF, global_F = super().observe(sizes, job, decided)
        global_F[GLOBAL_INDEX["held_out_accuracy"]] = 1.0 - 0.9 ** (self.gain * self.window)
        global_F[GLOBAL_INDEX["energy_j"]] = self.window_j
        self.window += 1
        return obs_WF, global_F


class BegunWith:
    """`rule` in a generation that begins with a profile, if there is one."""

    name, version, options = Rule.name, Rule.version, Rule.options

    def __init__(self, profile: JobProfile | None) -> None:
        self._profile = profile

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        first = b"" if self._profile is None else Rule().begin(job, self._profile)
        return Rule().decide(job, window, obs_WF, global_F, carry or first)


def next_run(
    earlier: JobProfile | None, objective: Objective, *, measured: bool = True
) -> tuple[JobProfile, list[Decision]]:
    """One more run of the family."""
    job = examples.job(
        {f"node-{rank}": (rank,) for rank in range(4)},
        job=f"mnist-{0 if earlier is None else earlier.run:08d}",
        policy="rule",
        min_local_batch_size=8,
        supports_tracking=True,
        family="mnist",
        explores=("learning_rate",),
        objective=objective,
    )
    tried = Exploration.of_records(() if earlier is None else earlier.arms_of(objective), is_restart=False).tried
    gain, window_j = GAINS_AND_JOULES[tried]
    cluster = Progressing(
        np.array([4000.0, 4000.0, 1000.0, 1000.0]),
        tracking=True,
        gain=gain,
        window_j=window_j if measured else math.nan,
    )
    decisions = cluster.run(BegunWith(earlier), job, NUM_WINDOWS)
    last = decisions[-1]
    action = examples.action(
        NUM_WINDOWS - 1, local_batch_sizes=last.allocation.local_batch_sizes, carry=last.carry, policy="rule"
    )
    profile = profile_after(job, action, Rule(), earlier)
    assert profile is not None
    assert decode(JobProfile, subject_of(profile), encode(profile)) == profile
    return profile, decisions


def chain_of(objective: Objective, num_runs: int) -> tuple[JobProfile, list[list[Decision]]]:
    profile, runs = None, []
    for _ in range(num_runs):
        profile, decisions = next_run(profile, objective)
        runs.append(decisions)
    assert profile is not None
    return profile, runs


@pytest.mark.parametrize(
    ("objective", "tried"),
    [("time", [1.0, 1.5, 2.25, 1.5]), ("energy", [1.0, 1.5, 1 / 1.5, 1 / 1.5])],
)
def test_the_arm_of_least_energy_is_taken_although_another_one_is_faster(
    objective: Objective, tried: list[float]
) -> None:
    profile, runs = chain_of(objective, 4)
    assert [decisions[0].allocation.rate_factor for decisions in runs] == pytest.approx(tried)
    stopped = [any("stopped trying" in one.note for one in decisions) for decisions in runs]
    assert stopped == ([False] * 4 if objective == "time" else [False, True, False, False])
    assert len(profile.arms_of(objective)) == 3
    assert profile.arms_of("time" if objective == "energy" else "energy") == ()


def test_a_run_of_unknown_energy_says_so_and_leaves_no_record() -> None:
    first, _ = next_run(None, "energy")
    second, decisions = next_run(first, "energy", measured=False)
    notes = [one.note for one in decisions]
    assert "a window's energy is unknown" in notes[0]
    assert "a window's energy is unknown" in decisions[0].reason
    assert not any("energy" in note for note in notes[1:])
    assert second.energy_arms == first.energy_arms
