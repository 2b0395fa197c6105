"""What `bench.cluster.target.session_cost` makes of the times of steps."""

import pytest
from bench.cluster.target.outcomes import TargetPoint
from bench.cluster.target.session_cost import parts_of, report, step_s, used_s


def _point(trained_s: float, num_steps: int) -> TargetPoint:
    sizes = (32,) * 4
    return TargetPoint(
        trained_s=trained_s, accuracy=0.5, num_steps=num_steps, num_samples=128 * num_steps, local_batch_sizes=sizes
    )


def test_the_cost_of_a_session_is_divided_into_steps_and_windows() -> None:
    assert parts_of(8.0, 8.0 + 0.5 + 4 / 10, 8.0 + 0.5 + 4 / 3) == pytest.approx((0.5, 4.0))


def test_a_step_is_timed_after_the_warm_up() -> None:
    assert step_s([_point(1.0, 10), _point(2.0, 40), _point(3.0, 90), _point(4.0, 140)]) == pytest.approx(0.02)


def test_what_hosts_use_is_counted_per_step_and_host_after_the_warm_up() -> None:
    points = [_point(1.0, 10), _point(2.0, 40), _point(3.0, 90), _point(4.0, 140)]
    assert used_s([1.0, 2.0, 4.0, 6.0], points) == pytest.approx(4.0 / 100 / 4)


def test_runs_are_compared_by_seed() -> None:
    found = {
        "plain": [8.0, 12.0],
        "static, windows of 10": [9.0, 13.0],
        "static, windows of 3": [10.0, 14.0],
        "static": [8.5, 12.5],
        "split": [9.5, 13.5],
    }
    text = report(found, {name: [each / 2 for each in times] for name, times in found.items()}).text
    assert "11.00 [-14.41, 36.41]  1.00 [1.00, 1.00]" in text
    assert "4.29 [4.29, 4.29] per window" in text
