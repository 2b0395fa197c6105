"""The settings of PPO, by cleanrl's names; apart from `ppo`, so that reading them needs no torch."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Objective = Literal["clipped", "simplified"]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class PPOSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an update. None of them is published (method section 3): these are the field's defaults."""

    objective: Objective = "clipped"
    """Which of the two variants."""
    learning_rate: Positive = 1e-3
    """Adam's."""
    anneal_lr: bool = True
    """Reduce the learning rate linearly to 0 over the planned episodes."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon: cleanrl's, not torch's."""
    gamma: Share = 0.995
    """Discount per window: 0.995 looks some 200 windows ahead, the length of a run."""
    gae_lambda: Share = 0.95
    """Between the critic alone (0) and the rewards alone (1)."""
    num_minibatches: AtLeastOne = 4
    """Parts of a batch, one optimizer step each."""
    update_epochs: AtLeastOne = 8
    """Passes over a batch."""
    norm_adv: bool = True
    """Normalise advantages in each minibatch."""
    clip_coef: Positive = 0.2
    """Change of a probability ratio at which its gradient is clipped."""
    clip_vloss: bool = True
    """Cut off the critic's change in the same way."""
    ent_coef: NotNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: NotNegative = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: Positive = 0.5
    """Largest norm of the gradient over all parameters."""
    target_kl: Positive | None = 0.02
    """Ends the passes over a batch when the policy has moved further than this; `None`: never."""
    hidden_sizes: tuple[AtLeastOne, ...] = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    neutral_logit: float = 1.0
    """The neutral action's initial advantage: untrained, it is chosen about e times as often as each other one."""


PAPER = PPOSettings(
    objective="simplified",
    learning_rate=3e-3,
    num_minibatches=1,
    update_epochs=4,
    ent_coef=0.0,
    target_kl=None,
    anneal_lr=False,
    neutral_logit=0.0,
)
"""The paper's variant as its text describes it: plain policy-gradient steps at the end of each episode. Their number
and size are ours: with fewer or smaller ones the policy hardly moves in the 15 episodes that the paper speaks of."""
