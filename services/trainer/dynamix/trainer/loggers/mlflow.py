"""A logger for MLflow."""

import sys
import time
from typing import Any

from .delivery import Metrics

JOB_TAG = "dynamix.job"


class MlflowLogger:
    """Logs each window's numbers as metrics, and texts as tags with their newest value.

    Into the run that is active where the logger is made, else into one of its own with the job's id as name; a
    restarted job goes on in the same run.
    """

    def __init__(
        self, run_id: str | None = None, *, experiment: str = "Default", tracking_uri: str | None = None
    ) -> None:
        """Log into a run; `tracking_uri` when not given is MLflow's own (`MLFLOW_TRACKING_URI`)."""
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
        from mlflow.entities import Metric, RunTag  # noqa: PLC0415 - an extra, and slow to import
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        if self._client is None:
            self._client = MlflowClient(self._tracking_uri)
        if self._run_id is None:
            self._run_id = self._begin(str(metrics["job"]))
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

    def _begin(self, job: str) -> str:
        """The run that an earlier start of the job has made, else a new one."""
        self._is_own = True
        found = self._client.get_experiment_by_name(self._experiment)
        experiment_id = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        earlier = self._client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{job}'", max_results=1)
        if earlier:
            run_id = earlier[0].info.run_id
            self._client.update_run(run_id, status="RUNNING")
            return str(run_id)
        return str(self._client.create_run(experiment_id, tags={JOB_TAG: job}, run_name=job).info.run_id)
