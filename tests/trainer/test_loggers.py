"""Metric loggers: found by name, fed in a thread, and never in training's way."""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.support import examples
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, make_model

from dynamix import trainer as dynamix
from dynamix.runtime.extensions import ExtensionError
from dynamix.trainer.wire.loggers import QUEUED_WINDOWS, Loggers, find_loggers, window_metrics

TIMEOUT_S = 10.0


class Recorded:
    """Keeps what it is given; it can be made to wait, or to fail from its second window on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.steps: list[int] = []
        self.num_closed = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._fails = fails

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:  # noqa: ARG002 - the protocol's arguments
        self.may_go_on.wait(TIMEOUT_S)
        if self._fails and self.steps:
            raise OSError("the disk is full")
        self.steps.append(step)

    def close(self) -> None:
        self.num_closed += 1


def test_every_logger_gets_every_window_in_order_and_is_closed_once() -> None:
    both = Recorded(), Recorded()
    loggers = Loggers(both)
    for step in (20, 40, 60):
        loggers.publish(step, examples.totals(), None)
    loggers.close(TIMEOUT_S)
    loggers.close(TIMEOUT_S)
    assert [(one.steps, one.num_closed) for one in both] == [([20, 40, 60], 1)] * 2


def test_a_logger_that_raises_is_closed_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    failing, working = Recorded(fails=True), Recorded()
    loggers = Loggers([failing, working])
    with caplog.at_level(logging.ERROR):
        for step in (20, 40, 60):
            loggers.publish(step, examples.totals(), None)
        loggers.close(TIMEOUT_S)
    assert (failing.steps, failing.num_closed) == ([20], 1)
    assert working.steps == [20, 40, 60]
    assert [record.getMessage() for record in caplog.records] == [
        "metric logger Recorded failed and gets no more metrics; training goes on"
    ]


def test_a_slow_logger_loses_the_oldest_windows_and_training_does_not_wait() -> None:
    slow = Recorded()
    slow.may_go_on.clear()
    loggers = Loggers([slow])
    for step in range(3 * QUEUED_WINDOWS):
        loggers.publish(step, examples.totals(), None)
    slow.may_go_on.set()
    loggers.close(TIMEOUT_S)
    assert slow.steps[-1] == 3 * QUEUED_WINDOWS - 1
    assert QUEUED_WINDOWS - 1 <= len(slow.steps) <= QUEUED_WINDOWS + 1


def test_metrics_have_units_in_their_names_and_leave_out_what_is_not_known() -> None:
    totals = examples.totals(num_steps=10, num_samples=1000, time_s=2.0, loss_sum=500.0, num_correct=None)
    found = window_metrics(totals, 0.75)
    assert {name: found[name] for name in ("loss", "step_time_s", "samples_per_s", "held_out_accuracy")} == {
        "loss": 0.5,
        "step_time_s": 0.2,
        "samples_per_s": 500.0,
        "held_out_accuracy": 0.75,
    }
    assert "accuracy" not in found


@pytest.mark.usefixtures("example_extension")
def test_what_cannot_log_is_refused() -> None:
    for rank in range(2):
        with pytest.raises(ValueError, match=r"no installed package registers a logger 'exampel' .* known are example"):
            find_loggers(["exampel"], rank=rank)
    with pytest.raises(TypeError, match=r"object is no metric logger: it needs log\(metrics, \*, step\) and close\(\)"):
        find_loggers([object()], rank=0)  # type: ignore[list-item]
    with pytest.raises(ExtensionError, match=r"example-extension 1\.0 registers 'example' .*EXAMPLE_LOGGER_FILE"):
        find_loggers(["example"], rank=0)
    assert find_loggers(["example"], rank=1) == []


def _train(rank: int, installed: Path, file: Path) -> None:
    import os  # noqa: PLC0415 - in the rank's process
    import sys  # noqa: PLC0415

    sys.path.insert(0, str(installed))
    os.environ["EXAMPLE_LOGGER_FILE"] = str(file.with_suffix(f".{rank}"))
    model = distribute(make_model(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"local_batch_size": 8, "min_local_batch_size": 1, "window_steps": 5, "policy": "static"}
    with dynamix.attach(model, optimizer, Numbered(400), connect=False, loggers=["example"], **options) as session:
        for _ in session.epochs(1):
            for inputs, targets, _ in session.loader:
                loss = torch.nn.functional.cross_entropy(model(inputs.float()), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.step(loss)


def test_a_job_logs_its_windows_to_an_installed_logger_in_rank_0(example_extension: Path, tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    run_ranks(_train, 2, example_extension, file)
    lines = [json.loads(line) for line in file.with_suffix(".0").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25]
    assert {line["global_batch_size"] for line in lines} == {16}
    assert not file.with_suffix(".1").exists()
