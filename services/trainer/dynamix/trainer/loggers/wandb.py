"""A logger for Weights & Biases."""

from typing import Any

from .delivery import Metrics

PREFIX = "dynamix/"
"""In front of our metrics: the script may log a `loss` of its own in the same run."""


class WandbLogger:
    """Logs each window into the script's run, else into a run of its own with the job's id, over restarts the same.

    The step is a metric like the others, and the axis of ours: the script's own steps are not touched.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        """Log into a `run`; else into the script's; else `wandb.init(**init)` makes one, for example in a project."""
        self._run = run
        self._init = init
        self._is_own = False
        self._is_begun = False
        self._prefix = ""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Log a window."""
        if not self._is_begun:
            self._begin(str(metrics["job"]))
        self._run.log({f"{self._prefix}{name}": value for name, value in {"step": step, **metrics}.items()})

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._is_own:
            self._run.finish()

    def _begin(self, job: str) -> None:
        import wandb  # noqa: PLC0415 - an extra, and slow to import

        self._run = self._run or wandb.run
        self._is_own = self._run is None
        if self._is_own:
            self._run = wandb.init(**{"id": job, "name": job, "resume": "allow", **self._init})
        self._prefix = "" if self._is_own else PREFIX
        self._run.define_metric(f"{self._prefix}step")
        self._run.define_metric(f"{self._prefix}*", step_metric=f"{self._prefix}step")
        self._is_begun = True
