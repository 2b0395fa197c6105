"""A job of a family begins with what an earlier run taught, and drops it when its first windows disagree."""

import msgspec
import numpy as np
import pytest
from tests.arbitrator.test_rule import job_of as job_of_rule
from tests.support import examples
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.policies.policy import Array32, Decision
from dynamix.arbitrator.policies.rule import Exploration, Rule, judged, next_arm
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX
from dynamix.schemas.messages import ArmRecord, Job, JobProfile

RATES = np.array([4000.0, 4000.0, 1000.0, 1000.0])
FAMILY = "mnist-0a1b2c3d"


def job_of(**changes: object) -> Job:
    return job_of_rule(4, **({"family": FAMILY, "base_global_batch_size": 128} | changes))


class Begun:
    """`rule` in a generation that begins with a profile."""

    name, version, options = Rule.name, Rule.version, Rule.options

    def __init__(self, profile: JobProfile) -> None:
        self._profile = profile

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        return Rule().decide(job, window, obs_WF, global_F, carry or Rule().begin(job, self._profile))


def cluster(**changes: float) -> ToyCluster:
    return ToyCluster(RATES * changes.pop("speed", 1.0), tracking=True, **({"communication_s": 0.1} | changes))


def profile_of(decisions: list[Decision], job: Job | None = None, earlier: JobProfile | None = None) -> JobProfile:
    last = decisions[-1]
    action = examples.action(
        len(decisions) - 1, local_batch_sizes=last.allocation.local_batch_sizes, carry=last.carry, policy="rule"
    )
    profile = Rule().profile_after(job or job_of(), action, earlier)
    assert profile is not None
    return profile


@pytest.fixture(scope="module")
def first() -> list[Decision]:
    return cluster().run(Rule(), job_of(), 20)


def test_without_a_profile_a_family_is_decided_as_no_family(first: list[Decision]) -> None:
    alone = cluster().run(Rule(), job_of(family=""), 20)
    assert [one.allocation for one in first] == [one.allocation for one in alone]
    assert [one.reason for one in first] == [one.reason for one in alone]


def test_the_second_run_begins_with_the_times_of_the_first(first: list[Decision]) -> None:
    second = cluster().run(Begun(profile_of(first)), job_of(), 6)
    best = first[-1].reason.split()[0]
    assert first[0].reason.split()[0] != best  # what is fixed of a step takes windows to learn
    assert int(second[0].reason.split()[0]) == pytest.approx(int(best), rel=0.02)
    assert second[0].reason.endswith("; begins with its profile")
    assert [one.note for one in second] == ["", "the first windows agree with its profile", "", "", "", ""]


@pytest.mark.parametrize("change", [{"speed": 0.5}, {"speed": 2.0}, {"communication_s": 0.5}])
def test_another_cluster_is_noticed_within_three_windows_and_decided_as_if_cold(
    first: list[Decision], change: dict[str, float]
) -> None:
    profile = profile_of(first)
    cold, warm = (cluster(**change).run(policy, job_of(), 20) for policy in (Rule(), Begun(profile)))
    notes = [one.note for one in warm]
    assert [window for window, note in enumerate(notes) if note.startswith("dropped its profile: ")] in ([1], [2])
    assert notes[1] in warm[1].reason
    assert [one.allocation for one in warm] == [one.allocation for one in cold]


def test_what_was_tried_on_another_cluster_is_neither_taken_nor_kept(first: list[Decision]) -> None:
    """Their times say nothing here, whichever arm they were of."""
    arms = tuple(ArmRecord(rate, 1, 0, (1.0, took)) for rate, took in ((1.0, 2.0), (1.5, 1.6), (2.25, 1.4)))
    profile = msgspec.structs.replace(profile_of(first), arms=arms)
    job = job_of(explores=("learning_rate",), job="mnist-11112222")
    same = cluster().run(Begun(profile), job, 20)
    assert {one.allocation.rate_factor for one in same} == {2.25}
    assert profile_of(same, job, profile).arms == arms
    slower = cluster(speed=0.5).run(Begun(profile), job, 20)
    dropped = next(window for window, one in enumerate(slower) if one.note.startswith("dropped its profile"))
    assert [one.allocation.rate_factor for one in slower] == [2.25] * dropped + [1.0] * (20 - dropped)
    kept = profile_of(slower, job, profile)
    assert (kept.arms, kept.run) == ((), 2)
    fewer = job_of_rule(2, family=FAMILY, explores=("learning_rate",))
    assert {one.allocation.rate_factor for one in ToyCluster(RATES[:2]).run(Begun(profile), fewer, 6)} == {1.0}


def test_profiles_count_runs_and_keep_what_a_run_could_not_measure(first: list[Decision]) -> None:
    one = profile_of(first)
    assert (one.run, one.num_windows, one.family, one.world_size) == (1, 20, FAMILY, 4)
    two = profile_of(first, job_of(job="mnist-11112222"), earlier=one)
    assert (two.run, two.job) == (2, "mnist-11112222")
    again = profile_of(first, job_of(job="mnist-11112222", generation=1), earlier=two)
    assert (again.run, again.memory) == (2, two.memory)


# --- what runs of a family try out ---

FIRST, FASTER, FURTHER, SLOWER = 1.0, 1.5, 2.25, 1 / 1.5


def record(arm: float, factor: float, stopped: int = 0) -> ArmRecord:
    return ArmRecord(arm, 1, stopped, tuple(factor * level for level in range(1, 11)))


def trained(exploration: Exploration, window_s: float, num_windows: int) -> Exploration:
    """After windows in which the held-out error fell by a factor of 0.9 each."""
    for window in range(num_windows):
        global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
        global_F[GLOBAL_INDEX["step_time_s"]] = window_s / 10
        global_F[GLOBAL_INDEX["held_out_accuracy"]] = 1.0 - 0.9**window
        exploration = exploration.observe(global_F, 10)
    return exploration


@pytest.mark.parametrize(
    ("records", "arm"),
    [
        ((), FIRST),
        ((ArmRecord(FIRST, 1, 0),), FIRST),  # nothing told how it went
        ((record(FIRST, 1.0),), FASTER),
        ((record(FIRST, 1.0), record(FASTER, 0.8)), FURTHER),
        ((record(FIRST, 1.0), record(FASTER, 1.1)), SLOWER),
        ((record(FIRST, 1.0), record(FASTER, 0.8, stopped=1)), SLOWER),
        ((record(FIRST, 1.0), record(FASTER, 0.8), record(FURTHER, 0.9)), FASTER),
        ((record(FIRST, 1.0), record(FASTER, 1.2), record(SLOWER, 0.99)), FIRST),
    ],
)
def test_two_runs_explore_and_then_the_best_arm_is_taken(records: tuple[ArmRecord, ...], arm: float) -> None:
    assert next_arm(records) == arm


def test_a_restart_tries_nothing() -> None:
    assert Exploration.of_records((record(FIRST, 1.0), record(FASTER, 0.8)), is_restart=True).tried == FASTER


@pytest.mark.parametrize(
    ("end_reason", "stopped", "first_counts"),
    [
        ("completed", 0, True),
        ("left", 0, True),
        ("RuntimeError: loss is nan", 1, False),
        ("KeyboardInterrupt", None, False),
        ("SignalException: Process 7 got signal: 15", None, False),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation", None, False),
    ],
)
def test_how_a_run_ended_says_whether_it_counts_for_its_arm(
    end_reason: str, stopped: int | None, first_counts: bool
) -> None:
    found = judged(record(FASTER, 0.8), end_reason)
    assert (None if found is None else found.num_stopped) == stopped
    assert (judged(record(FIRST, 1.0), end_reason) is not None) == first_counts


def test_a_run_that_falls_behind_by_a_quarter_goes_back_to_the_best_arm() -> None:
    first = trained(Exploration(), 1.0, 20).record
    assert first is not None
    begun = Exploration.of_records((first,), is_restart=False)
    assert (begun.rate_factor, begun.best) == (FASTER, FIRST)
    assert not trained(begun, 1.1, 20).stopped
    behind = trained(begun, 1.6, 20)
    assert behind.stopped
    assert behind.rate_factor == FIRST
    found = behind.record
    assert found is not None
    assert (found.rate_factor, found.num_stopped) == (FASTER, 1)
    assert not trained(Exploration(tried=FIRST, reference=begun.reference), 1.6, 20).stopped
