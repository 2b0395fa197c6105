"""The clock of training time, which stands still while an accuracy is looked up."""

import pytest
from bench.cluster.target.clock import FIRST_STEPS, TrainingClock


def test_the_clock_stands_still_between_stop_and_go_on() -> None:
    clock = TrainingClock(1.0, 100.0)
    assert clock.check_in(100.1) == int(0.8 * 0.9 / 0.05)  # two steps of 0.05 s
    assert clock.check_in(100.8) == 4
    assert clock.check_in(101.01) == 0
    clock.stop(101.05)  # the slowest rank has checked in
    assert clock.trained_s == pytest.approx(1.05)
    assert clock.plan_steps() == int(0.8 * 0.95 / 0.0525)
    clock.go_on(150.0)
    assert clock.check_in(150.2) > 0
    clock.stop(150.3)
    assert clock.trained_s == pytest.approx(1.35)


def test_steps_that_become_slower_are_noticed_before_the_next_point_of_the_grid() -> None:
    clock, now_s, trained_s, points = TrainingClock(1.0, 0.0), 0.0, 0.0, []
    steps = FIRST_STEPS
    while trained_s < 9.5:
        passed_s = steps * (0.02 if trained_s < 4.5 else 0.08)
        now_s, trained_s = now_s + passed_s, trained_s + passed_s
        steps = clock.check_in(now_s)
        if steps == 0:
            clock.stop(now_s)
            assert clock.trained_s == pytest.approx(trained_s)
            points.append(trained_s)
            steps = clock.plan_steps()
            now_s += 5.0  # the pause
            clock.go_on(now_s)
    assert points[:4] == pytest.approx([1, 2, 3, 4], abs=0.05)
    assert points[5:] == pytest.approx(range(6, 6 + len(points[5:])), abs=0.3)


def test_points_of_the_grid_that_one_long_step_passes_are_one() -> None:
    clock = TrainingClock(1.0, 0.0)
    assert clock.check_in(3.5) == 0
    clock.stop(3.5)
    assert clock.plan_steps() == 1
    clock.go_on(10.0)
    assert clock.check_in(11.75) == 0
