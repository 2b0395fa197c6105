"""The library in the training process: `from dynamix.trainer import attach`."""

from dynamix.schemas.messages.allocation import Exchange

from .attach import attach
from .gradient.clock import StepTimes
from .session import Session

__all__ = ["Exchange", "Session", "StepTimes", "attach"]
