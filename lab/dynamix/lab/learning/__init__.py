"""Learning: a policy is learned on an analytic surrogate, and validated in virtual clusters.

In: a `LearningPlan`: everything that determines the outcome. Out: a `LearningResult`: the policy file and a row per
update. `run` has the plan with its presets, and the loop of jobs, update, validation and checkpoint. Equal plans give
bit-equal policies on one machine, for any number of workers and however often a run was killed.
"""

from .run import PRESETS, LearningPlan, LearningResult, LearningUpdate, Observer, learn, plan_named

__all__ = ["PRESETS", "LearningPlan", "LearningResult", "LearningUpdate", "Observer", "learn", "plan_named"]
