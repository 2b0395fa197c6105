"""What is kept of a learning run: a row per update, failure signatures, TensorBoard curves, and the checkpoint.

The checkpoint is one file, replaced atomically; resuming from it gives bit-equal results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from dynamix.arbitrator.deciding.signatures import Finding, reward_signatures, value_signature
from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind

from .plan import LearningPlan

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


KIND = FileKind("a checkpoint of `dynamix learn`", lambda head: head[1:13] == b"\xabplan_digest")
"""A map in MessagePack, its first field as below."""
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance")


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
    """`vs_rule` of the likeliest actions on the validation seeds; `None` when this update was not validated."""

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


@contextmanager
def curves(directory: Path | None) -> Iterator[Callable[[LearningUpdate], None]]:
    """Give a function that writes a row to TensorBoard files in a directory; without a directory it does nothing."""
    if directory is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - a second to import, and an extra

    with SummaryWriter(str(directory)) as writer:
        yield partial(_write_row, writer)


def _write_row(writer: "SummaryWriter", row: LearningUpdate) -> None:
    """Add one point to every curve, over episodes."""
    values = {
        "episode/return": row.mean_return,
        "episode/time_to_target_vs_rule": row.vs_rule,
        "episode/time_to_target_s": sum(row.times_s) / len(row.times_s),
        "episode/missed": row.num_missed,
        "validation/time_to_target_vs_rule": row.validation_vs_rule,
        **{f"losses/{name}": getattr(row, name) for name in LOSSES},
        "charts/learning_rate": row.learning_rate,
    }
    for name, value in values.items():
        if value is not None:
            writer.add_scalar(name, value, row.num_episodes)
    writer.flush()


class LearningCheckpointError(ValueError):
    """A checkpoint that cannot be resumed from; the text says why and what to do."""


class LearningCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a learning run between two updates."""

    plan_digest: str
    references_s: dict[str, float]
    """Mean time of `rule` to the target, by scenario."""
    validation_s: dict[str, list[float]]
    """Its times on the validation seeds, by scenario."""
    current: bytes
    """The current policy file, with the moments of the optimizer."""
    best: bytes
    """The best by validation so far."""
    best_vs_rule: float
    history: list[LearningUpdate]
    elapsed_s: float

    def write(self, path: Path) -> None:
        """Replace the file at once, after its content is on the disk: killed at any moment, a whole one is there."""
        output_files.write(path, msgspec.msgpack.encode(self))

    @classmethod
    def read(cls, path: Path, plan: LearningPlan) -> Self | None:
        """The checkpoint of a plan; `None` when there is none.

        Raises:
            LearningCheckpointError: when it is another plan's, or cannot be read.
        """
        try:
            found = msgspec.msgpack.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise LearningCheckpointError(
                f"the checkpoint {path} cannot be read ({error}): remove it to start again"
            ) from error
        if found.plan_digest != plan.digest:
            raise LearningCheckpointError(
                f"the checkpoint {path} belongs to another plan: remove it to start again, or name another output"
            )
        return found
