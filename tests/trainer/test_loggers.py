"""Metric loggers: found by name, fed in a thread, and never in training's way."""

import csv
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support import examples
from tests.support.rows import row

from dynamix.extras.loggers import CsvLogger, JsonlLogger
from dynamix.trainer.loggers import QUEUED_WINDOWS, MetricHistory, Metrics, window_metrics

TIMEOUT_S = 10.0


class Recorded:
    """Keeps what it is given; it can be made to wait, or to fail from its second window on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.steps: list[int] = []
        self.metrics: list[dict[str, float | str]] = []
        self.num_closed = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._fails = fails

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.may_go_on.wait(TIMEOUT_S)
        if self._fails and self.steps:
            raise OSError("the disk is full")
        self.steps.append(step)
        self.metrics.append(dict(metrics))

    def close(self) -> None:
        self.num_closed += 1


def window_of(window: int) -> Metrics:
    return {"job": examples.JOB, "generation": 0, "window": window, "loss": 0.5}


def test_a_logger_that_raises_is_closed_once_and_the_others_get_every_window(caplog: pytest.LogCaptureFixture) -> None:
    failing, working = Recorded(fails=True), Recorded()
    history = MetricHistory([failing, working])
    with caplog.at_level(logging.ERROR):
        for window in range(3):
            history.add_window(20 * window, window_of(window))
        history.close(TIMEOUT_S)
        history.close(TIMEOUT_S)
    assert (failing.steps, failing.num_closed) == ([0], 1)
    assert (working.steps, working.num_closed) == ([0, 20, 40], 1)
    assert working.metrics == [window_of(window) for window in range(3)]
    assert history.rows() == [{"step": 20 * window, **window_of(window)} for window in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "metric logger Recorded failed and gets no more metrics; training goes on"
    ]


def test_a_slow_logger_loses_the_oldest_windows_and_training_does_not_wait() -> None:
    slow = Recorded()
    slow.may_go_on.clear()
    history = MetricHistory([slow])
    for window in range(3 * QUEUED_WINDOWS):
        history.add_window(window, window_of(window))
    slow.may_go_on.set()
    history.close(TIMEOUT_S)
    assert slow.steps[-1] == 3 * QUEUED_WINDOWS - 1
    assert QUEUED_WINDOWS - 1 <= len(slow.steps) <= QUEUED_WINDOWS + 1


def test_metrics_have_units_in_their_names_and_leave_out_what_is_not_known() -> None:
    totals = examples.totals(num_steps=10, num_samples=1000, time_s=2.0, loss_sum=500.0, num_correct=None)
    rows = [
        row(num_samples=500, held_out_accuracy=0.75, data_time_s=0.2, update_time_s=0.3, **times)
        for times in (
            {"compute_time_s": 1.0, "sync_time_s": 0.5},
            {"compute_time_s": 1.5, "sync_time_s": 0.0},
        )
    ]
    assert window_metrics(rows, totals, (40, 60)) == {
        "window": 0,
        "global_batch_size": 512,
        "num_samples": 1000,
        "loss": 0.5,
        "step_time_s": 0.2,
        "samples_per_s": 500.0,
        "held_out_accuracy": 0.75,
        "noise_scale": 2000.0,
        **{f"local_batch_size/{name}": value for name, value in by_rank(40, 60).items()},
        **{f"data_time_s/{name}": value for name, value in by_rank(0.02, 0.02).items()},
        **{f"compute_time_s/{name}": value for name, value in by_rank(0.1, 0.15).items()},
        **{f"sync_time_s/{name}": value for name, value in by_rank(0.05, 0.0).items()},
        **{f"update_time_s/{name}": value for name, value in by_rank(0.03, 0.03).items()},
    }


def by_rank(first: float, second: float) -> dict[str, float]:
    both = {"rank_0": first, "rank_1": second}
    return {"min": min(first, second), "mean": (first + second) / 2, "max": max(first, second), **both}


# --- files -----------------------------------------------------------------------------------------------------------


def test_json_lines_are_appended_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    for step in (20, 40):
        logger = JsonlLogger(path)
        logger.log(window_of(step // 20 - 1), step=step)
        logger.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 20, **window_of(0)},
        {"step": 40, **window_of(1)},
    ]


def test_a_metric_that_comes_later_is_a_further_column_of_the_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    CsvLogger(path).log(window_of(0), step=20)
    logger = CsvLogger(path)
    logger.log({**window_of(1), "reason": 'a "text", with\na break'}, step=40)
    logger.log(window_of(2), step=60)
    logger.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["window"], row["reason"]) for row in rows] == [
        ("20", "0", ""),
        ("40", "1", 'a "text", with\na break'),
        ("60", "2", ""),
    ]


@pytest.mark.parametrize(("make", "noun"), [(CsvLogger, "a CSV file"), (JsonlLogger, "a file of metrics")])
def test_a_file_of_something_else_is_refused_when_the_logger_is_made(tmp_path: Path, make: Any, noun: str) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    with pytest.raises(ValueError, match=f"exists and is not {noun}"):
        make(path)
