"""In the training process: report, adopt, weight, load data. `from dynamix.trainer import attach`."""

from .attach import attach
from .measurement.clock import StepTimes
from .session import Session

__all__ = ["Session", "StepTimes", "attach"]
