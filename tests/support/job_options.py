"""Options of `attach`, checked, for tests that need some."""

from typing import Any

from dynamix.trainer.job.options import JobOptions


def job_options(**changes: Any) -> JobOptions:
    """Options of a job on two ranks, some of them changed."""
    fields: dict[str, Any] = {
        "local_batch_sizes": (128, 128),
        "base_global_batch_size": 256,
        "window_steps": 20,
        "min_local_batch_size": 32,
        "max_local_batch_size": 1024,
        "max_lag_windows": 4,
        "margin_steps": 2,
        "policy": "static",
        "policy_options": {},
        "optimizer_family": "sgd",
        "learning_rate_rule": "sqrt",
        "reduction": "mean",
        "seed": 0,
        "shuffle": True,
        "drop_last": False,
        "noise_every": 2,
    }
    return JobOptions(**(fields | changes))
