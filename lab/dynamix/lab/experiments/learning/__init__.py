"""Learning a policy on virtual clusters: `learn` a `LearningPlan`."""

from .history import LearningUpdate
from .plan import PRESETS, LearningPlan, plan_named
from .run import LearningResult, Observer, learn

__all__ = ["PRESETS", "LearningPlan", "LearningResult", "LearningUpdate", "Observer", "learn", "plan_named"]
