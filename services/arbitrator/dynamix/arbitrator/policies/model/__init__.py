"""Model: what is observed of a window, and fitted to it: the time of a step and the gradient noise scale.

In: an observation. Out: its columns by name and the last known B_noise (`observation`), T(B) of a job (`step_time`,
fitted by `step_time_fit` and, rank by rank, `rank_times`). The fits are packed into a policy's carry. No policy has to
use them.

You may improve a fit; policies that use it then need a new `version`. Nothing here knows of policies.
"""
