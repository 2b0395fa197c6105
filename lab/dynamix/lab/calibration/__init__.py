"""Calibration: fit a scenario to the metric windows of a real job, and compare virtual with real step times.

In: the metric windows of one job, its specification, and settings that windows do not contain. Out: a `Calibration`:
the scenario, its errors on windows that the fit has not seen, and remarks on what could not be determined.
`observations` makes arrays of the windows; `lines` (time per rank) and `exposure` (communication) fit one formula each,
and `changes` finds ranks that became slower or faster for good; `fit` applies them in order and adds the disturbances;
`scenario` solves the clock's formulas for the keys of a scenario; `result` compares. The formulas are those of
`simulator.clock`: a change there needs a change here.
"""

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
