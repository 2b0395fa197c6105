"""Learning: a policy is learned in episodes on virtual clusters.

In: a `LearningPlan`: everything that determines the outcome. Out: a `LearningResult`: the policy file and a row per
update. `run` has the plan with its presets, and the loop of episodes, update, validation and checkpoint; `episodes`
plays an episode and makes its trajectory. Equal plans give bit-equal policies on one machine, for any number of workers
and however often a run was killed.
"""

from .run import PRESETS, LearningPlan, LearningResult, LearningUpdate, Observer, learn, plan_named

__all__ = ["PRESETS", "LearningPlan", "LearningResult", "LearningUpdate", "Observer", "learn", "plan_named"]
