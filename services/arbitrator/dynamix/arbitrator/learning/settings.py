"""Settings of the learner: `DYNAMIX_LEARNER_<FIELD>` or `--field`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dynamix.schemas.subjects import check_token

Positive = Annotated[float, Meta(gt=0)]


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One learner learns one policy, from the jobs that run under it with the option `explore`."""

    policy: str = "ppo"
    """The name of the policy. It continues from the newest version on the bus, else from the shipped one, else new."""
    jobs: str = "*"
    """Which jobs to learn from: a pattern of their names, with `*` and `?`."""
    generations_per_update: Annotated[int, Meta(ge=1)] = 4
    """Generations in a batch; each update makes a new version."""
    max_staleness: Annotated[int, Meta(ge=0)] = 2
    """Generations decided by a version further behind the newest than this are left out."""
    grace_s: Positive = 10.0
    """How long to wait for the last rewards of a generation that is over."""
    rewards: Literal["own", "any"] = "own"
    """`own`: generations whose rewards are of another formula than the policy's are left out; `any`: they are not."""
    reward_formula: Literal["auto", "paper-sgd", "paper-adam", "time-aware"] = "auto"
    """For a new policy: the value of DYNAMIX_REWARD_FORMULA of the jobs that it will learn from."""
    action_set: Literal["deltas", "global"] = "global"
    """For a new policy: one choice per rank, or one for the job."""
    objective: Literal["clipped", "simplified"] = "clipped"
    """For a new policy: PPO's, or the paper's."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """For a new policy: the seed of its initial parameters."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that cannot be a policy's."""
        check_token(self.policy)
