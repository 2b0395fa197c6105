"""Loggers: each window's metrics for the user's own tools, and for notebooks.

`window_metrics` makes a flat mapping of a window's rows; `history` keeps the newest windows, adds the rewards that come
later, and hands each window on once; `delivery` is the thread in which loggers run, in global rank 0. The others are
loggers: files, TensorBoard, Weights & Biases, MLflow. Their packages are imported with the first window, and needed
only where they are used.

You may add a metric or a logger. What must stay: training never waits for a logger, and none can stop it.
"""

from .delivery import MetricLogger, Metrics
from .files import CsvLogger, JsonlLogger
from .mlflow import MlflowLogger
from .tensorboard import TensorBoardLogger
from .wandb import WandbLogger

__all__ = [
    "CsvLogger",
    "JsonlLogger",
    "MetricLogger",
    "Metrics",
    "MlflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
