"""What runs of a family try out: at most two arms, the better direction, and back when a run falls behind."""

import numpy as np
import pytest

from dynamix.arbitrator.policies.rule import Exploration, judged, next_arm
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX
from dynamix.schemas.messages import ArmRecord

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
