"""The demo: from its jobs' logs and messages to a summary, a line and a picture."""

import pytest
from tests.support import examples

from dynamix.cli.commands.demo import DemoPlan, DemoRun, DemoStep, summarise
from dynamix.recording.job_view import JobView

PLAN = DemoPlan(target_accuracy=0.8, window_steps=2)
SIZES = [(128, 128), (150, 106), (154, 102), (154, 102)]


def progress(step_time_s: float, accuracies: dict[int, float]) -> list[DemoStep]:
    times = {step: {"trained_s": step * step_time_s, "step_time_s": step_time_s} for step in range(1, 9)}
    return [DemoStep(step=step, samples=512 * step, accuracy=accuracies.get(step), **times[step]) for step in times]


def a_job() -> JobView:
    view = JobView(examples.JOB)
    for window, (first, second) in enumerate(SIZES):
        rows = (examples.row(1, local_batch_size=second), examples.row(0, local_batch_size=first))
        view.fold(examples.report(window=window, rows=rows))
        view.fold(examples.window("node-a", (0, 1), window))
    for window in (0, 1, 1):
        view.fold(examples.applied(window, window + 2))
    return view


def a_run(policy: str = "static", step_time_s: float = 0.1) -> DemoRun:
    log = progress(step_time_s, {2: 0.5, 4: 0.79, 5: 0.81, 6: 0.82, 7: 0.79})
    return summarise(PLAN, policy, log, a_job())


def test_the_clock_stops_when_the_mean_of_three_evaluations_is_at_the_target() -> None:
    run = a_run()
    assert run.time_to_target_s == pytest.approx(0.6)
    assert run.final_accuracy == 0.79
    assert run.median_step_time_s == pytest.approx(0.1)
    assert (run.num_steps, run.num_windows, run.num_actions_applied) == (8, 4, 2)
    assert len(run.local_batch_sizes) == 4
    assert summarise(PLAN, "static", progress(0.1, {2: 0.5}), a_job()).time_to_target_s is None
