from pathlib import Path

import msgspec
import pytest
from tests.support import examples

from dynamix.cli.commands.demo.figure import draw
from dynamix.cli.commands.demo.plan import DemoPlan, DemoRun, DemoStep, read_progress, summarise
from dynamix.cli.commands.demo.view import DemoProgress
from dynamix.schemas.messages import Applied, Report

PLAN = DemoPlan(target_accuracy=0.8, window_steps=2)


def progress(step_time_s: float, accuracies: dict[int, float]) -> list[DemoStep]:
    return [
        DemoStep(
            step=step,
            trained_s=step * step_time_s,
            step_time_s=step_time_s,
            samples=512 * step,
            accuracy=accuracies.get(step),
        )
        for step in range(1, 9)
    ]


def reports(sizes: list[tuple[int, int]]) -> list[Report]:
    return [
        examples.report(
            window=window, rows=(examples.row(1, local_batch_size=second), examples.row(0, local_batch_size=first))
        )
        for window, (first, second) in enumerate(sizes)
    ]


def applied(*windows: int) -> list[Applied]:
    return [
        Applied(
            job=examples.JOB,
            generation=0,
            decided_window=window,
            effective_window=window + 2,
            effective_step=2 * window + 4,
            local_batch_sizes=(128, 128),
        )
        for window in windows
    ]


def a_run(policy: str = "static", step_time_s: float = 0.1) -> DemoRun:
    sizes = [(128, 128), (150, 106), (154, 102), (154, 102)]
    return summarise(
        PLAN,
        policy,
        progress(step_time_s, {2: 0.5, 4: 0.79, 5: 0.81, 6: 0.82, 7: 0.79}),
        reports(sizes),
        applied(0, 1, 1),
    )


def test_the_clock_stops_when_the_mean_of_three_evaluations_is_at_the_target() -> None:
    summary = a_run().summary
    assert summary.time_to_target_s == pytest.approx(0.6)
    assert summary.final_accuracy == 0.79
    assert summary.median_step_time_s == pytest.approx(0.1)
    assert (summary.num_steps, summary.num_windows) == (8, 4)


def test_an_action_told_twice_is_applied_once() -> None:
    assert a_run().summary.num_actions_applied == 2


def test_sizes_are_per_window_in_rank_order() -> None:
    assert a_run().summary.local_batch_sizes[:2] == [[128, 128], [150, 106]]


def test_a_target_that_was_not_reached_has_no_time() -> None:
    run = summarise(PLAN, "static", progress(0.1, {2: 0.5}), reports([(1, 1)]), [])
    assert run.summary.time_to_target_s is None


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in progress(0.1, {}))
    assert len(read_progress(lines[:-5])) == 7


def test_the_json_has_the_documented_keys() -> None:
    run = msgspec.json.decode(msgspec.json.encode(a_run().summary))
    assert set(run) == {
        "policy",
        "seed",
        "time_to_target_s",
        "target_accuracy",
        "final_accuracy",
        "median_step_time_s",
        "num_steps",
        "num_windows",
        "num_actions_applied",
        "local_batch_sizes",
    }


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw([a_run(), a_run("split", 0.05), a_run("rule", 0.02)], PLAN, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_last_line_of_a_run_has_the_accuracy_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    plan = DemoPlan(min_windows=30)
    with DemoProgress(plan) as progress:
        progress.show_window("static", 3, examples.report(window=11, held_out_accuracy=0.82), is_final=True)
        progress.show_window("static", 9, examples.report(window=39, held_out_accuracy=0.838), is_final=True)
    first, last = capsys.readouterr().err.splitlines()
    assert "window 12 of at least 30: " in first
    assert "window 40: " in last
    assert "83.8%, 9 applied" in last
