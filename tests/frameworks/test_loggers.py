"""TensorBoard, Weights & Biases and MLflow themselves: what a job logged is read back by their own means."""

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamix.extras.loggers import MlflowLogger, TensorBoardLogger, WandbLogger
from dynamix.trainer.loggers import MetricLogger, Metrics

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the frameworks
TIMEOUT_S = 60.0
BLOCK_BYTES = 32 * 1024
RECORD_HEAD = struct.Struct("<IHB")
"""Checksum, length, kind."""
WINDOWS: list[Metrics] = [
    {"job": "logged-01234567", "window": 0, "loss": 1.5, "local_batch_size/rank_0": 96, "reason": "no action came"},
    {"job": "logged-01234567", "window": 1, "loss": 0.5, "local_batch_size/rank_0": 64, "reason": "no action came"},
]


def log_in_thread(logger: MetricLogger, windows: list[Metrics], first_step: int = 20) -> None:
    """Log windows in a thread of their own, as a session does."""

    def log() -> None:
        for index, metrics in enumerate(windows):
            logger.log(metrics, step=first_step + 20 * index)
        logger.close()

    thread = threading.Thread(target=log)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def read_events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def points(events: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_the_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make test-frameworks")
    monkeypatch.chdir(tmp_path)
    log_in_thread(TensorBoardLogger(), WINDOWS)
    events = read_events(tmp_path / "runs/logged-01234567")
    assert points(events, "loss") == [(20, 1.5), (40, 0.5)]
    assert points(events, "local_batch_size/rank_0") == [(20, 96.0), (40, 64.0)]
    assert [event.step for event in events.Tensors("reason/text_summary")] == [20]  # it did not change


# --- Weights & Biases ------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = pytest.importorskip("wandb", reason="wandb is not installed: make test-frameworks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield found
    found.teardown()


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a log as LevelDB writes it, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    data, at, parts = path.read_bytes(), 7, b""
    while at < len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < RECORD_HEAD.size:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = RECORD_HEAD.unpack_from(data, at)
        at += RECORD_HEAD.size + length
        parts += data[at - length : at]
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_rows(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """The id of the one offline run in a directory, and its rows."""
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    (name,) = {record.run.run_id for record in records if record.run.run_id}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.history.item
    ]
    return name, rows


def test_wandb_gets_a_run_with_the_jobs_id(wandb: Any, tmp_path: Path) -> None:
    log_in_thread(WandbLogger(), WINDOWS)
    assert wandb.run is None  # it has finished
    wandb.teardown()  # its service has written the file
    name, rows = wandb_rows(tmp_path)
    assert name == "logged-01234567"
    assert [(row["step"], row["loss"], row["local_batch_size/rank_0"]) for row in rows] == [
        (20, 1.5, 96),
        (40, 0.5, 64),
    ]
    assert rows[0]["reason"] == "no action came"


def test_wandb_logs_into_the_scripts_run_and_leaves_its_names_alone(wandb: Any, tmp_path: Path) -> None:
    with wandb.init(id="theirs") as run:
        run.log({"loss": 9.0})
        log_in_thread(WandbLogger(), WINDOWS)
        assert wandb.run is run
        run.log({"loss": 8.0})
    wandb.teardown()  # its service has written the file
    name, rows = wandb_rows(tmp_path)
    assert name == "theirs"
    assert [row["loss"] for row in rows if "loss" in row] == [9.0, 8.0]
    assert [(row["dynamix/step"], row["dynamix/loss"]) for row in rows if "dynamix/step" in row] == [
        (20, 1.5),
        (40, 0.5),
    ]


# --- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("mlflow", reason="mlflow is not installed: make test-frameworks")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found.set_tracking_uri(None)
    return found


def mlflow_points(mlflow: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in mlflow.MlflowClient().get_metric_history(run_id, name)]


def test_a_restarted_job_goes_on_in_its_mlflow_run(mlflow: Any) -> None:
    log_in_thread(MlflowLogger(), WINDOWS[:1])
    log_in_thread(MlflowLogger(), WINDOWS[1:], first_step=40)
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("logged-01234567", "FINISHED")
    assert mlflow_points(mlflow, run.info.run_id, "loss") == [(20, 1.5), (40, 0.5)]
    assert mlflow_points(mlflow, run.info.run_id, "local_batch_size/rank_0") == [(20, 96.0), (40, 64.0)]
    assert run.data.tags["dynamix.reason"] == "no action came"
