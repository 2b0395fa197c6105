"""Calibration: a real job's metric windows become a scenario, and a comparison of virtual with real step times."""

from .observations import NotEnoughWindowsError, Observations, observe
from .result import Calibration, Comparison, calibrate
from .scenario import Settings

__all__ = [
    "Calibration",
    "Comparison",
    "NotEnoughWindowsError",
    "Observations",
    "Settings",
    "calibrate",
    "observe",
]
