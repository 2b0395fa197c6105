"""Loggers: each window's metrics for the user's own tools; training never waits for a logger, and none can stop it."""

from .delivery import MetricLogger, Metrics
from .tools import CsvLogger, JsonlLogger, MlflowLogger, TensorBoardLogger, WandbLogger

__all__ = [
    "CsvLogger",
    "JsonlLogger",
    "MetricLogger",
    "Metrics",
    "MlflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
