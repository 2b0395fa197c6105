"""Runs: what determines one, what it came to, and the folder that keeps each in a file of its own."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from dynamix.lab.experiments.episodes.provenance import EPISODE_PACKAGES, versions
from dynamix.recording.capture.fingerprint import source_digest
from dynamix.runtime import output_files

from .arms import TargetArm
from .cases import TargetCase

CODE = (*EPISODE_PACKAGES, "dynamix.runtime", "bench.hosts", "bench.cluster.target")
"""Packages whose code a run goes through: what changed it never counts as a run of the new code."""
KEY_CHARACTERS = 16
LOOKS = 3
"""Looks at the accuracy whose mean counts: the accuracy of one differs by about 1 % from that of the next."""
EARLY = 0.4
"""Share of the best run so far before which no other one is compared with it."""
BEHIND = 0.05
"""In accuracy."""


class TargetRun(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What determines a run, except for the machine."""

    case: TargetCase
    arm: TargetArm
    seed: int
    target_accuracy: float
    grid_s: float

    @cached_property
    def key(self) -> str:
        """Digest of all that, of the code and of the libraries."""
        case = msgspec.structs.replace(self.case, title="", time_limit_s=0.0)
        about = {
            "run": msgspec.to_builtins(msgspec.structs.replace(self, case=case), str_keys=True),
            "code": source_digest(CODE),
            "versions": versions(),
        }
        return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()[:KEY_CHARACTERS]

    @property
    def label(self) -> str:
        """Case, row and seed in words, for readers."""
        return f"{self.case.name}, {self.arm.label}, seed {self.seed}"


class TargetPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the grid of training time."""

    trained_s: float
    accuracy: float
    """Held out."""
    num_steps: int
    num_samples: int
    local_batch_sizes: tuple[int, ...]


class TargetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as its file has it."""

    case: str
    arm: str
    seed: int
    time_to_target_s: float | None
    """Training time at which the target was first seen to be reached; `None`: missed."""
    limit_s: float
    """Training time after which the run was ended."""
    points: list[TargetPoint]
    wall_s: float
    """With start, evaluations and end."""

    @property
    def counted_s(self) -> float:
        """Time to the target; the limit for a run that missed it."""
        return self.limit_s if self.time_to_target_s is None else self.time_to_target_s

    def mean_time_s(self, accuracies: Sequence[float]) -> float:
        """Mean of the training times to several accuracies; the limit for one that was not reached."""
        return sum(self._time_to(accuracy) for accuracy in accuracies) / len(accuracies)

    def _time_to(self, accuracy: float) -> float:
        seen = (self.points[:number] for number in range(1, len(self.points) + 1))
        return next((points[-1].trained_s for points in seen if is_at_target(points, accuracy)), self.limit_s)

    def answers(self, limit_s: float) -> bool:
        """Whether a run up to that limit would show nothing else."""
        return self.time_to_target_s is not None or self.limit_s >= limit_s


def is_at_target(points: Sequence[TargetPoint], target_accuracy: float) -> bool:
    """Whether the mean accuracy of the newest looks has reached the target: a single one may be lucky."""
    return len(points) >= LOOKS and _newest(points) >= target_accuracy


def is_behind(points: Sequence[TargetPoint], best_so_far: Sequence[TargetPoint]) -> bool:
    """Whether a run is so far below where the best one so far was at that time that it need not go on."""
    number = len(points)
    if number < max(2 * LOOKS, EARLY * len(best_so_far)) or number > len(best_so_far):
        return False
    return _newest(points) < _newest(best_so_far[:number]) - BEHIND


def _newest(points: Sequence[TargetPoint]) -> float:
    newest = points[-LOOKS:]
    return sum(point.accuracy for point in newest) / len(newest)


class Outcomes:
    """A folder with a file per run, and captures beside them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, run: TargetRun) -> TargetOutcome | None:
        """What is known of a run, up to whatever limit."""
        path = self._path(run, "json")
        return msgspec.json.decode(path.read_bytes(), type=TargetOutcome) if path.exists() else None

    def keep(self, run: TargetRun, outcome: TargetOutcome) -> None:
        """Write an outcome: whole, or not at all."""
        text = msgspec.json.format(msgspec.json.encode(outcome), indent=1)
        output_files.write(self._path(run, "json"), text + b"\n", make_parents=True)

    def capture_of(self, run: TargetRun) -> Path:
        """Where the capture of a run is, or shall be."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._path(run, "dxc")

    def _path(self, run: TargetRun, suffix: str) -> Path:
        return self._directory / f"{run.case.name}-{run.arm.policy or 'ddp'}-{run.seed}-{run.key}.{suffix}"
