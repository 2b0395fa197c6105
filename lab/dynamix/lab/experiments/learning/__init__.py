"""Learning a policy on virtual clusters: `learn` a `LearningPlan`."""

from .course import Learning, Observer, learn
from .history import Update
from .plan import PRESETS, LearningPlan, plan_named

__all__ = ["PRESETS", "Learning", "LearningPlan", "Observer", "Update", "learn", "plan_named"]
