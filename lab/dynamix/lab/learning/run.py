"""A learning run: episodes, update, validation, checkpoint, until the plan is done or the time is over."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple, Self

import msgspec
import numpy as np

from dynamix.arbitrator.deciding.signatures import Finding, reward_signatures, value_signature
from dynamix.arbitrator.learned.policy_file import PolicyFile, PolicyMetadata
from dynamix.arbitrator.learning.agent import Agent
from dynamix.lab.simulator.episode import EpisodeError, run_in_order
from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import Weights
from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind

from .episodes import EpisodeResult, EpisodeTask, play
from .plan import SCORE_SEEDS, VALIDATION_SEEDS, LearningPlan

KIND = FileKind("a checkpoint of `dynamix learn`", lambda head: head[1:13] == b"\xabplan_digest")
"""A map in MessagePack, its first field as below."""


class LearningUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One update: its batch of episodes, and PPO's numbers (named as cleanrl names them)."""

    update: int
    """Number of the update, from 1."""
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


class LearningCheckpointError(ValueError):
    """The checkpoint cannot be resumed from; the message has the reason and the fix."""


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


Observer = Callable[[LearningUpdate, Sequence[Finding]], None]
"""Called after each update with its row and the failure signatures that began with it."""


class LearningResult(NamedTuple):
    """The learned policy and the rows of all updates."""

    file: PolicyFile
    history: list[LearningUpdate]
    finished: bool
    """Whether the plan was done; if not, the time was over, and learning can be resumed from the checkpoint."""


def learn(
    plan: LearningPlan,
    *,
    num_workers: int = 2,
    checkpoint: Path | None = None,
    minutes: float | None = None,
    data: Path | None = None,
    observer: Observer | None = None,
) -> LearningResult:
    """Learn a plan, or resume it from a checkpoint.

    Args:
        plan: what determines the outcome; the number of workers does not.
        num_workers: processes that play episodes.
        checkpoint: file to resume from, written after each update; the caller removes it.
        minutes: stop after the update that passes this time, counted over all starts.
        data: directory of the data sets.
        observer: is told of each update.

    Raises:
        LearningCheckpointError: when the checkpoint belongs to another plan.
        EpisodeError: when an episode cannot be played, for example for want of data, or teaches nothing.
    """
    found = LearningCheckpoint.read(checkpoint, plan) if checkpoint else None
    run = _LearningRun(plan, num_workers, data, found)
    while not run.is_done and not (minutes is not None and run.elapsed_s > 60 * minutes):
        row, begun = run.update()
        if checkpoint is not None:
            run.state().write(checkpoint)
        if observer is not None:
            observer(row, begun)
    return LearningResult(run.result(), run.history, run.is_done)


class _LearningRun:
    """The state between two updates, and how to do the next one."""

    def __init__(
        self, plan: LearningPlan, num_workers: int, data: Path | None, found: LearningCheckpoint | None
    ) -> None:
        self._plan = plan
        self._num_workers = num_workers
        self._data = data
        self._begin_s = time.monotonic()
        if found is None:
            self._agent = Agent.new(_metadata(plan), plan.settings)
            everywhere = [scenario for stage in plan.stages for scenario in stage]
            rules = self._times(b"", VALIDATION_SEEDS, plan.num_validation_seeds, everywhere)
            means = {name: float(np.mean([run.time_s for run in runs])) for name, runs in rules.items()}
            times = {name: [run.time_s for run in runs] for name, runs in rules.items()}
            content = self._agent.file().to_bytes()
            found = LearningCheckpoint(
                plan_digest=plan.digest,
                references_s=means,
                validation_s=times,
                current=content,
                best=content,
                best_vs_rule=math.inf,  # never return an untrained version: that is the rule itself
                history=[],
                elapsed_s=0.0,
            )
        self._agent = Agent.of(PolicyFile.from_bytes(found.current))
        self._before = found
        self.history = list(found.history)

    @property
    def is_done(self) -> bool:
        """Whether the plan has no further update."""
        return len(self.history) >= self._plan.num_updates

    @property
    def elapsed_s(self) -> float:
        """Wall-clock time of learning over all starts, in seconds."""
        return self._before.elapsed_s + time.monotonic() - self._begin_s

    def state(self) -> LearningCheckpoint:
        """Return the current state as a checkpoint."""
        return msgspec.structs.replace(
            self._before,
            current=self._agent.file().to_bytes(),
            history=self.history,
            elapsed_s=self.elapsed_s,
        )

    def update(self) -> tuple[LearningUpdate, list[Finding]]:
        """Play a batch, learn from it, validate now and then; the row, and the failure signatures that are new."""
        before = {finding.signature for finding in findings(self.history)}
        row = self._learned(len(self.history))
        self.history.append(row)
        return row, [finding for finding in findings(self.history) if finding.signature not in before]

    def result(self) -> PolicyFile:
        """The version that the plan asks for, with its scores on seeds that chose nothing."""
        plan = self._plan
        content = self._before.best if plan.select == "best" else self._agent.file().to_bytes()
        rules = self._times(b"", SCORE_SEEDS, plan.num_score_seeds)
        runs = self._times(content, SCORE_SEEDS, plan.num_score_seeds)
        ratios = {
            name: geometric_mean([own.time_s / rule.time_s for own, rule in zip(runs[name], rules[name], strict=True)])
            for name in runs
        }
        flat = [run for found in runs.values() for run in found]
        scores = {f"vs_rule/{name}": ratio for name, ratio in ratios.items()}
        scores |= {"vs_rule": geometric_mean(ratios.values()), "missed": float(sum(run.missed for run in flat))}
        scores["num_runs"] = float(len(flat))
        file = PolicyFile.from_bytes(content)
        done = self.history[: file.metadata.num_updates]
        metadata = msgspec.structs.replace(
            file.metadata, scores=scores, num_episodes=done[-1].num_episodes if done else 0
        )
        return PolicyFile(metadata, file.tensors)

    def _learned(self, number: int) -> LearningUpdate:
        plan, file = self._plan, self._agent.file().to_bytes()
        tasks = [self._training_task(episode, file) for episode in plan.episodes_of(number)]
        played = run_in_order(play, tasks, jobs=self._num_workers)
        trajectories = [found.trajectory for found in played if found.trajectory is not None]
        if not trajectories:
            raise EpisodeError(
                f"{tasks[0].name}, and all other episodes of update {number + 1}: over before a decision applied to a "
                "window; raise target_accuracy, or lower window_steps"
            )
        learned = self._agent.learn(trajectories, progress=number / plan.num_updates)
        stats, references_s = learned.stats, self._before.references_s
        explained = learned.explained_variance
        return LearningUpdate(
            update=number + 1,
            num_episodes=plan.episodes_of(number).stop,
            returns=tuple(trajectory.total_reward for trajectory in trajectories),
            times_s=tuple(found.time_s for found in played),
            num_missed=sum(found.missed for found in played),
            vs_rule=geometric_mean(
                run.time_s / references_s[task.scenario.name] for task, run in zip(tasks, played, strict=True)
            ),
            **{name: value for name, value in stats._asdict().items() if name in LearningUpdate.__struct_fields__},
            explained_variance=explained if math.isfinite(explained) and plan.settings.objective == "clipped" else None,
            num_decisions=learned.num_decisions,
            validation_vs_rule=self._validated(number),
            elapsed_s=self.elapsed_s,
        )

    def _training_task(self, episode: int, file: bytes) -> EpisodeTask:
        plan = self._plan
        scenario = plan.scenario_of(episode)
        reference_s = self._before.references_s[scenario.name]
        weights = plan.weights
        if plan.formula == "time-aware":
            weights = msgspec.structs.replace(weights, beta=weights.beta / reference_s)
        return EpisodeTask(
            scenario=scenario,
            seed=plan.training_seed(episode),
            policy=file,
            mode="explore",
            formula=plan.formula,
            weights=weights,
            fixed_s=reference_s if plan.episode_end == "fixed" else None,
            data=self._data,
        )

    def _validated(self, number: int) -> float | None:
        """Time to target of the likeliest actions against the rule, now and then; the best version is kept."""
        plan = self._plan
        if (number + 1) % plan.validate_every and number + 1 != plan.num_updates:
            return None
        content = self._agent.file().to_bytes()
        runs = self._times(content, VALIDATION_SEEDS, plan.num_validation_seeds)
        rules = self._before.validation_s
        ratios = [run.time_s / rule for name in runs for run, rule in zip(runs[name], rules[name], strict=True)]
        vs_rule = geometric_mean(ratios)
        if vs_rule < self._before.best_vs_rule:
            self._before = msgspec.structs.replace(self._before, best=content, best_vs_rule=vs_rule)
        return vs_rule

    def _times(
        self, policy: bytes, first_seed: int, num_seeds: int, scenarios: Sequence[Scenario] | None = None
    ) -> dict[str, list[EpisodeResult]]:
        """Greedy runs, by default in every scenario of the last stage; no bytes: of the rule."""
        scenarios = self._plan.stages[-1] if scenarios is None else scenarios
        tasks = [
            EpisodeTask(scenario=scenario, seed=first_seed + number, policy=policy, mode="greedy", data=self._data)
            for scenario in scenarios
            for number in range(num_seeds)
        ]
        played = iter(run_in_order(play, tasks, jobs=self._num_workers))
        return {scenario.name: [next(played) for _ in range(num_seeds)] for scenario in scenarios}


def _metadata(plan: LearningPlan) -> PolicyMetadata:
    return PolicyMetadata.of(
        action_set=plan.action_set,
        policy=plan.policy,
        algorithm=plan.settings.objective,
        hidden_sizes=plan.settings.hidden_sizes,
        reward_formula=plan.formula or "auto",
        reward_weights={name: float(getattr(plan.weights, name)) for name in Weights.__struct_fields__},
        scenarios=tuple(scenario.name for stage in plan.stages for scenario in stage),
        seeds=(plan.seed,),
    )
