"""Calibration: fit a scenario to the metric windows of a real job, and compare virtual with real step times.

In: the metric windows of one job, its specification, and settings that windows do not contain. Out: a `Calibration`:
the scenario, its errors on windows that the fit has not seen, and remarks on what could not be determined.
"""

from .calibrate import Calibration, CalibrationSettings, RankSpeed, StepTimeComparison, calibrate, scenario_text
from .fit import NotEnoughWindowsError

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "NotEnoughWindowsError",
    "RankSpeed",
    "StepTimeComparison",
    "calibrate",
    "scenario_text",
]
