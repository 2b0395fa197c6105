"""Calibration: a real job's metric windows become a scenario, and a comparison of virtual with real step times."""

from .observations import NotEnoughWindowsError
from .result import Calibration, RankSpeed, StepTimeComparison, calibrate
from .scenario import CalibrationSettings, scenario_text

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "NotEnoughWindowsError",
    "RankSpeed",
    "StepTimeComparison",
    "calibrate",
    "scenario_text",
]
