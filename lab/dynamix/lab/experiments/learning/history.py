"""The history of a learning run: one row per update, its failure signatures, and TensorBoard curves."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from dynamix.arbitrator.deciding.signatures import Finding, reward_signatures, value_signature

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class LearningUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One update: its batch of episodes, and PPO's numbers (named as cleanrl names them)."""

    update: int
    """From 1."""
    num_episodes: int
    """Played until now."""
    elapsed_s: float
    """Wall-clock time of learning until now, over all its starts."""
    returns: tuple[float, ...]
    """Undiscounted, of each episode of the batch."""
    times_s: tuple[float, ...]
    """To the target, virtual; a miss counts as the time limit."""
    num_missed: int
    vs_rule: float
    """Geometric mean of the times over what `rule` takes in the same scenario: sampled actions, so above the truth."""
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clipfrac: float
    explained_variance: float | None
    """`None` when the returns had no variance, or there is no critic."""
    learning_rate: float
    num_decisions: int
    validation_vs_rule: float | None = None
    """As `vs_rule`, of the likeliest actions on the validation seeds; `None` when this update was not validated."""

    @property
    def mean_return(self) -> float:
        """Mean return over the batch."""
        return sum(self.returns) / len(self.returns)


def findings(history: Sequence[LearningUpdate]) -> list[Finding]:
    """Return the failure signatures of a learning run so far (method section 3)."""
    explained = [row.explained_variance for row in history if row.explained_variance is not None]
    found = reward_signatures([row.mean_return for row in history])
    if (mute := value_signature(explained)) is not None:
        found.append(mute)
    return found


class Curves:
    """Writes TensorBoard files to a directory, or nothing without a directory."""

    def __init__(self, directory: Path | None) -> None:
        self._writer: SummaryWriter | None = None
        self._directory = directory

    def __enter__(self) -> Self:
        if self._directory is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - a second to import, and an extra

            self._writer = SummaryWriter(str(self._directory))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write_row(self, row: LearningUpdate) -> None:
        """Add one point to every curve, over episodes."""
        if self._writer is None:
            return
        values = {
            "episode/return": row.mean_return,
            "episode/time_to_target_vs_rule": row.vs_rule,
            "episode/time_to_target_s": sum(row.times_s) / len(row.times_s),
            "episode/missed": row.num_missed,
            "validation/time_to_target_vs_rule": row.validation_vs_rule,
            "losses/policy_loss": row.policy_loss,
            "losses/value_loss": row.value_loss,
            "losses/entropy": row.entropy,
            "losses/approx_kl": row.approx_kl,
            "losses/clipfrac": row.clipfrac,
            "losses/explained_variance": row.explained_variance,
            "charts/learning_rate": row.learning_rate,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, row.num_episodes)
        self._writer.flush()
