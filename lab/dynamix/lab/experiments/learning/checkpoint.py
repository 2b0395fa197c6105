"""The state of a learning run in one file, replaced atomically; resuming from it gives bit-equal results."""

from pathlib import Path
from typing import Self

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind

from .history import LearningUpdate
from .plan import LearningPlan

KIND = FileKind("a checkpoint of `dynamix learn`", lambda head: head[1:13] == b"\xabplan_digest")
"""A map in MessagePack, its first field as below."""


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
        output_files.write(path, msgspec.msgpack.encode(self), streams=False)

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
