"""What runs of a family try out: at most two arms, the better direction, and back when a run falls behind."""

import math

import numpy as np
import pytest
from tests.support import examples

from dynamix.arbitrator.deciding.profiles import judged
from dynamix.arbitrator.policies.exploration import Exploration, next_arm
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX
from dynamix.schemas.messages import ArmRecord, ExploredArm, Job
from dynamix.schemas.messages.allocation import Objective

BOTH = ("learning_rate", "noise_multiplier")
FIRST, FASTER, FURTHER, QUIETER = ExploredArm(), ExploredArm(1.5), ExploredArm(2.25), ExploredArm(1.0, 0.5)


def job_of(*explores: str, **changes: object) -> Job:
    return examples.job(policy="rule", family="mnist", explores=explores, **changes)


def record(arm: ExploredArm, factor: float, stopped: int = 0) -> ArmRecord:
    return ArmRecord(arm, 1, stopped, tuple(factor * level for level in range(1, 11)))


def trained(
    exploration: Exploration,
    window_s: float,
    num_windows: int,
    *,
    window_j: float = math.nan,
    objective: Objective = "time",
) -> Exploration:
    """After windows in which the held-out error fell by a factor of 0.9 each."""
    for window in range(num_windows):
        global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
        global_F[GLOBAL_INDEX["step_time_s"]] = window_s / 10
        global_F[GLOBAL_INDEX["held_out_accuracy"]] = 1.0 - 0.9**window
        global_F[GLOBAL_INDEX["energy_j"]] = window_j
        exploration = exploration.observe(global_F, 10, objective)
    return exploration


@pytest.mark.parametrize(
    ("explores", "records", "arm"),
    [
        (BOTH, (), FIRST),
        (BOTH, (ArmRecord(FIRST, 1, 0),), FIRST),  # nothing told how it went
        ((), (record(FIRST, 1.0),), FIRST),
        (BOTH, (record(FIRST, 1.0),), FASTER),
        (BOTH, (record(FIRST, 1.0), record(FASTER, 0.8)), FURTHER),
        (BOTH, (record(FIRST, 1.0), record(FASTER, 1.1)), QUIETER),
        (BOTH, (record(FIRST, 1.0), record(FASTER, 0.8, stopped=1)), QUIETER),
        (("learning_rate",), (record(FIRST, 1.0), record(FASTER, 1.1)), ExploredArm(1 / 1.5)),
        (("noise_multiplier",), (record(FIRST, 1.0),), QUIETER),
        (("noise_multiplier",), (record(FIRST, 1.0), record(QUIETER, 0.9)), ExploredArm(1.0, 0.25)),
        (BOTH, (record(FIRST, 1.0), record(FASTER, 0.8), record(FURTHER, 0.9)), FASTER),
        (BOTH, (record(FIRST, 1.0), record(FASTER, 1.2), record(QUIETER, 0.99)), FIRST),
    ],
)
def test_two_runs_explore_and_then_the_best_arm_is_taken(
    explores: tuple[str, ...], records: tuple[ArmRecord, ...], arm: ExploredArm
) -> None:
    assert next_arm(records, job_of(*explores)) == arm


def test_arms_that_the_job_does_not_permit_are_neither_taken_nor_gone_further() -> None:
    """Runs before it permitted others: a trainer would refuse each action."""
    faster, quieter = (record(FIRST, 1.0), record(FASTER, 0.8)), (record(FIRST, 1.0), record(QUIETER, 0.8))
    assert next_arm(faster, job_of("noise_multiplier")) == QUIETER
    assert next_arm(quieter, job_of("learning_rate")) == FASTER
    begun = Exploration.of_records((*faster, record(FURTHER, 0.7)), job_of("noise_multiplier"))
    assert (begun.tried, begun.best) == (QUIETER, FIRST)
    assert begun.reference[:10].tolist() == list(range(1, 11))
    assert Exploration.of_records(faster, job_of(*BOTH, generation=1)).tried == FASTER  # a restart tries nothing out


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
    begun = Exploration.of_records((first,), job_of(*BOTH))
    assert (begun.arm, begun.best) == (FASTER, FIRST)
    assert not trained(begun, 1.1, 20).stopped
    behind = trained(begun, 1.6, 20)
    assert behind.stopped
    assert behind.arm == FIRST
    found = behind.record
    assert found is not None
    assert (found.arm, found.num_stopped) == (FASTER, 1)
    assert not trained(Exploration(tried=FIRST, reference=begun.reference), 1.6, 20).stopped
