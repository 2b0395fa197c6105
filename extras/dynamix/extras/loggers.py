"""Loggers into files, TensorBoard, Weights & Biases and MLflow; packages are imported with the first window."""

import csv
import io
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind
from dynamix.trainer.loggers import Metrics

JOB_TAG = "dynamix.job"
PREFIX = "dynamix/"
"""Prefix of our metrics in W&B: the script may log its own `loss` in the same run."""


class _FileLogger:
    """Appends each window to a file, by default `<job>` with its ending in the working directory.

    A restarted job continues in the same file, which is complete after each window.
    """

    ending: str
    kind: FileKind

    def __init__(self, path: str | Path | None = None) -> None:
        """Raises ValueError when something else is at `path`."""
        self._path = None if path is None else self._checked(path)

    def _checked(self, path: str | Path) -> Path:
        output_files.check(Path(path), self.kind, make_parents=True)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path)

    def _path_of(self, metrics: Metrics) -> Path:
        self._path = self._path or self._checked(f"{metrics['job']}{self.ending}")
        return self._path

    def close(self) -> None:
        """Do nothing: nothing is buffered."""


class JsonlLogger(_FileLogger):
    """Appends each window as a line of JSON."""

    ending = ".jsonl"
    kind = FileKind("a file of metrics as lines of JSON", lambda head: head.startswith(b'{"step": '))

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Append a line."""
        with self._path_of(metrics).open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


class CsvLogger(_FileLogger):
    """Appends each window as a row; for a metric that was not known before the file is written again as a whole."""

    ending = ".csv"
    kind = FileKind("a CSV file of metrics", lambda head: head.startswith(b"step,"))
    _columns: tuple[str, ...] = ()

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Append a row."""
        path, row = self._path_of(metrics), {"step": step, **metrics}
        if not row.keys() <= set(self._columns):
            rows: list[dict[str, str]] = []
            if path.exists():
                with path.open(newline="") as file:
                    rows = list(reader := csv.DictReader(file))
                    self._columns = tuple(reader.fieldnames or ())
            self._columns = tuple(dict.fromkeys([*self._columns, *row]))
            content = io.StringIO(newline="")
            writer = csv.DictWriter(content, self._columns)
            writer.writeheader()
            writer.writerows(rows)
            output_files.write(path, content.getvalue().encode())
        with path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)


def _require(package: str) -> None:
    """Make sure that a package is installed; a directory without code does not count: W&B makes one of its own name."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"the package {package} is not installed here: pip install 'dynamix-batch[{package}]'")


class MlflowLogger:
    """Logs each window's numbers as metrics, and texts as tags with their newest value.

    Into the run that is active where the logger is made, else into one of its own with the job's id as name; a
    restarted job continues in the same run.
    """

    def __init__(
        self, run_id: str | None = None, *, experiment: str = "Default", tracking_uri: str | None = None
    ) -> None:
        """Log into a run; `tracking_uri` when not given is MLflow's own (`MLFLOW_TRACKING_URI`)."""
        _require("mlflow")
        # MLflow's active run is one per thread: asked for here, in the script's; without an import there is none
        active = sys.modules["mlflow"].active_run() if run_id is None and "mlflow" in sys.modules else None
        self._run_id: str | None = run_id if active is None else active.info.run_id
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._is_own = False
        self._tags: dict[str, str] = {}

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Log a window in one request, and the texts that are others than before."""
        from mlflow.entities import Metric, RunTag
        from mlflow.tracking import MlflowClient

        if self._client is None:
            self._client = MlflowClient(self._tracking_uri)
        if self._run_id is None:  # the run that an earlier start of the job has made, else a new one
            job, self._is_own = str(metrics["job"]), True
            found = self._client.get_experiment_by_name(self._experiment)
            experiment_id = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            earlier = self._client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{job}'", max_results=1)
            run = (earlier or [self._client.create_run(experiment_id, tags={JOB_TAG: job}, run_name=job)])[0]
            self._run_id = str(run.info.run_id)
            if earlier:
                self._client.update_run(self._run_id, status="RUNNING")
        now_ms = int(time.time() * 1000)
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        texts = {f"dynamix.{name}": value for name, value in metrics.items() if isinstance(value, str)}
        self._client.log_batch(
            self._run_id,
            metrics=[Metric(name, float(value), now_ms, step) for name, value in numbers.items()],
            tags=[RunTag(name, value) for name, value in texts.items() if self._tags.get(name) != value],
        )
        self._tags = texts

    def close(self) -> None:
        """End the run, if it is ours."""
        if self._is_own:
            self._client.set_terminated(self._run_id)


class TensorBoardLogger:
    """Writes each window's numbers as scalars, and the reason of a decision as text when it is another one."""

    def __init__(self, log_dir: str | Path | None = None, *, writer: Any = None) -> None:
        """Write into a directory, by default `runs/<job>`; or by a `SummaryWriter` of the script, which stays open."""
        _require("tensorboard")
        self._log_dir = log_dir
        self._writer = writer
        self._is_own = writer is None
        self._texts: dict[str, str] = {}

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Write a window, and flush: TensorBoard shows it at once."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._log_dir or Path("runs") / str(metrics["job"])))
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
            elif self._texts.get(name) != value:
                self._texts[name] = value
                self._writer.add_text(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer, if it is ours."""
        if self._is_own and self._writer is not None:
            self._writer.close()


class WandbLogger:
    """Logs each window into the script's run, else into a run of its own with the job's id, over restarts the same.

    The step is a metric like the others, and the axis of ours: the script's own steps are not touched.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        """Log into a `run`; else into the script's; else `wandb.init(**init)` makes one, for example in a project."""
        _require("wandb")
        self._run = run
        self._init = init
        self._is_own = False
        self._is_begun = False
        self._prefix = ""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Log a window."""
        if not self._is_begun:
            import wandb

            job, self._run = str(metrics["job"]), self._run or wandb.run
            self._is_own = self._run is None
            if self._is_own:
                self._run = wandb.init(**{"id": job, "name": job, "resume": "allow", **self._init})
            self._prefix = "" if self._is_own else PREFIX
            self._run.define_metric(f"{self._prefix}step")
            self._run.define_metric(f"{self._prefix}*", step_metric=f"{self._prefix}step")
            self._is_begun = True
        self._run.log({f"{self._prefix}{name}": value for name, value in {"step": step, **metrics}.items()})

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._is_own:
            self._run.finish()
