"""Calibration: a real job's metric windows become a scenario, and a comparison of virtual with real step times."""

from .observations import NotEnoughWindowsError
from .result import Calibration, Comparison, RankSpeed, calibrate
from .scenario import Settings
from .scenario_file import scenario_text

__all__ = [
    "Calibration",
    "Comparison",
    "NotEnoughWindowsError",
    "RankSpeed",
    "Settings",
    "calibrate",
    "scenario_text",
]
