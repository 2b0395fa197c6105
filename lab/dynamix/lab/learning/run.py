"""A learning run: its plan, which determines the outcome, and its updates.

Jobs on the surrogate are learned from. Episodes in virtual clusters, with real gradients, choose and score the version
that is kept; to learn from them as well gained nothing (144 episodes of `ppo`).
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from types import MappingProxyType
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta

from dynamix.arbitrator.deciding.signatures import Finding, reward_signatures, value_signature
from dynamix.arbitrator.learned.policy import LearnedPolicy, metadata_of
from dynamix.arbitrator.learned.policy_file import ActionSetName, PolicyFile, PPOSettings, UpdateStats
from dynamix.arbitrator.learning.ppo import Agent
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named, policy_names
from dynamix.lab.simulator.episode import run_episode, run_in_order, workload_data
from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import TIME_ONLY, Formula, Weights
from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind
from dynamix.schemas.messages.allocation import Token
from dynamix.schemas.policies import DIVIDED_BY_RANKS

from .surrogate import SurrogateTask, play_surrogate

AtLeastOne = Annotated[int, Meta(ge=1)]
VALIDATION_SEEDS, SCORE_SEEDS = 500_000, 600_000
"""Where the seeds of episodes begin: to choose the best version by, to score it with. They are disjoint, also from
those of an evaluation, which count from 0."""
SEEDS_PER_LEARNING = 100_000


class LearningPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A learning run; equal plans give bit-equal policies on one machine."""

    policy: Token
    """The name of what is learned."""
    scenarios: tuple[Scenario, ...]
    """Those with `learn = true` are learned from on the surrogate; versions are compared in their virtual clusters."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    action_set: ActionSetName = "levers"
    settings: PPOSettings = PPOSettings()
    num_updates: AtLeastOne = 400
    jobs_per_scenario: AtLeastOne = 24
    """Jobs of each update and scenario."""
    windows_per_job: Annotated[int, Meta(ge=4)] = 64
    formula: Formula | None = "time-aware"
    """`time-aware`: the logarithm of progress per second; `None`: the published one for each scenario's optimizer."""
    weights: Weights = TIME_ONLY
    """Weights of the published reward."""
    validate_every: AtLeastOne = 200
    """Updates between two validations."""
    num_validation_seeds: AtLeastOne = 2
    num_score_seeds: AtLeastOne = 2

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid plan: no scenario to learn from, or a name in use."""
        if self.policy in policy_names():
            raise ValueError(f"{self.policy!r} is the name of a policy in code: give the learned one another name")
        if not self.learned_from:
            names = ", ".join(scenario.name for scenario in self.scenarios) or "none"
            raise ValueError(f"no scenario to learn from: one with learn = true is needed, there are {names}")
        if servers := [scenario.name for scenario in self.learned_from if scenario.network.topology != "ring"]:
            raise ValueError(
                f'scenario {servers[0]}: the surrogate has no parameter servers; use network.topology = "ring"'
            )

    @property
    def learned_from(self) -> tuple[Scenario, ...]:
        """The scenarios that may be learned from."""
        return tuple(scenario for scenario in self.scenarios if scenario.learn)

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, by which a checkpoint is matched."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


SUITE_OF: Mapping[ActionSetName, str] = MappingProxyType({"levers": "varying/train", "deltas": "published/train"})
"""The scenarios that each action set is learned and tried in, unless others are asked for."""
PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "ppo": {},
        "ppo-paper": {"action_set": "deltas", "num_updates": 200, "jobs_per_scenario": 16},
    }
)
"""`ppo`: levers, without a model of the job. `ppo-paper`: the published state and actions, a change of each worker's
size, with another reward: by the published one, `formula=null`, sizes end at the lower bound (docs/learning.md)."""


def plan_named(policy: str, scenarios: tuple[Scenario, ...], **changes: object) -> LearningPlan:
    """The preset of a policy's name with changes; another name has the preset of `ppo`.

    Raises:
        ValueError: when a value cannot be used; the message names it.
    """
    fields: dict[str, object] = {"policy": policy, "scenarios": scenarios}
    fields |= {**PRESETS.get(policy, PRESETS["ppo"]), **changes}
    try:
        return msgspec.convert(fields, LearningPlan)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ValueError(f"{name}={fields[name]!r}: {reason}" if name in fields else str(error)) from error


KIND = FileKind("a checkpoint of `dynamix learn`", lambda head: head[1:13] == b"\xabplan_digest")
"""A map in MessagePack, its first field as below."""


class LearningUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One update from a batch of jobs."""

    update: int
    """Number of the update, from 1."""
    elapsed_s: float
    """Wall-clock time of learning until now, over all its starts."""
    returns: tuple[float, ...]
    """Undiscounted, of each group of jobs in the batch."""
    stats: UpdateStats
    validation_vs_rule: float | None = None
    """Geometric mean, on the validation seeds, of the times to the target over what `rule` takes in the same scenario;
    of the likeliest actions. `None` when this update was not validated."""

    @property
    def mean_return(self) -> float:
        """Mean return over the batch."""
        return sum(self.returns) / len(self.returns)


def findings(history: Sequence[LearningUpdate]) -> list[Finding]:
    """Return the failure signatures of a learning run so far (method section 3)."""
    explained = [row.stats.explained_variance for row in history if row.stats.explained_variance is not None]
    return [*reward_signatures([row.mean_return for row in history]), *filter(None, [value_signature(explained)])]


class LearningCheckpointError(ValueError):
    """The checkpoint cannot be resumed from; the message has the reason and the fix."""


class LearningCheckpoint(msgspec.Struct, kw_only=True):
    """The state of a learning run between two updates."""

    plan_digest: str
    validation_s: dict[str, list[float]]
    """Times of `rule` to the target on the validation seeds, by scenario."""
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


class EpisodeTask(NamedTuple):
    """One episode in a virtual cluster."""

    scenario: Scenario
    seed: int
    policy: bytes
    """The file; empty for `rule`."""
    data: Path | None

    @property
    def name(self) -> str:
        """Scenario and seed in words, for messages."""
        return f"scenario {self.scenario.name}, seed {self.seed}"


def play(task: EpisodeTask) -> float:
    """Run one episode in this process, by the likeliest actions: its time to the target, at most the time limit.

    Raises:
        ValueError: when the scenario's data is missing, or the policy cannot be used.
    """
    policy: Policy = policy_named("rule")
    options: dict[str, float] = {}
    if task.policy:
        policy = LearnedPolicy(PolicyFile.from_bytes(task.policy))
        tracks = "track" in policy.options and policy.options["track"].default == 1
        if tracks and policy.name not in DIVIDED_BY_RANKS:  # its name does not tell its ranks that they divide
            options = {"track": 1.0}
    episode = run_episode(
        msgspec.structs.replace(task.scenario, fixed_time_s=0.0),  # over when the target is reached
        policy,
        data=workload_data(task.scenario.workload, task.data),
        seed=task.seed,
        policy_options=options,
    )
    return task.scenario.time_limit_s if episode.time_to_target_s is None else episode.time_to_target_s


class LearningResult(NamedTuple):
    """The learned policy and the rows of all updates."""

    file: PolicyFile
    history: list[LearningUpdate]


def learn(
    plan: LearningPlan,
    *,
    num_workers: int = 2,
    checkpoint: Path | None = None,
    data: Path | None = None,
    observer: Observer | None = None,
) -> LearningResult:
    """Learn a plan, or resume it from a checkpoint.

    Args:
        plan: what determines the outcome; the number of workers does not.
        num_workers: processes that play episodes.
        checkpoint: file to resume from, written after each update; the caller removes it.
        data: directory of the data sets.
        observer: is called with each update.

    Raises:
        LearningCheckpointError: when the checkpoint belongs to another plan.
        EpisodeError: when an episode cannot be played, for example for want of data.
    """
    begun_s = time.monotonic()

    def times(policy: bytes, first_seed: int, num_seeds: int) -> dict[str, list[float]]:
        """Seconds to the target by scenario; no bytes: of `rule`."""
        tasks = [
            EpisodeTask(scenario=scenario, seed=first_seed + number, policy=policy, data=data)
            for scenario in plan.learned_from
            for number in range(num_seeds)
        ]
        played = iter(run_in_order(play, tasks, jobs=num_workers))
        return {scenario.name: [next(played) for _ in range(num_seeds)] for scenario in plan.learned_from}

    state = LearningCheckpoint.read(checkpoint, plan) if checkpoint else None
    if state is None:
        metadata = metadata_of(
            plan.action_set,
            policy=plan.policy,
            settings=plan.settings,
            reward_formula=plan.formula or "auto",
            reward_weights={name: float(getattr(plan.weights, name)) for name in Weights.__struct_fields__},
            scenarios=tuple(scenario.name for scenario in plan.learned_from),
            seeds=(plan.seed,),
        )
        untrained = Agent.new(metadata).file().to_bytes()
        state = LearningCheckpoint(
            plan_digest=plan.digest,
            validation_s=times(b"", VALIDATION_SEEDS, plan.num_validation_seeds),
            current=untrained,
            best=untrained,
            best_vs_rule=math.inf,  # never return an untrained version: that is the rule itself
            history=[],
            elapsed_s=0.0,
        )
    agent, before_s = Agent.of(PolicyFile.from_bytes(state.current)), state.elapsed_s
    while (number := len(state.history)) < plan.num_updates:
        known = {finding.signature for finding in findings(state.history)}
        trajectories = run_in_order(play_surrogate, _surrogate_tasks(plan, number, state.current), jobs=num_workers)
        stats = agent.learn(trajectories, progress=number / plan.num_updates)
        state.current = agent.file().to_bytes()
        vs_rule = None
        if (number + 1) % plan.validate_every == 0 or number + 1 == plan.num_updates:
            own_s, rule_s = times(state.current, VALIDATION_SEEDS, plan.num_validation_seeds), state.validation_s
            pairs = (pair for name in own_s for pair in zip(own_s[name], rule_s[name], strict=True))
            vs_rule = geometric_mean(own / rule for own, rule in pairs)
            if vs_rule < state.best_vs_rule:
                state.best, state.best_vs_rule = state.current, vs_rule
        state.elapsed_s = before_s + time.monotonic() - begun_s
        row = LearningUpdate(
            update=number + 1,
            elapsed_s=state.elapsed_s,
            returns=tuple(trajectory.total_reward for trajectory in trajectories),
            stats=stats,
            validation_vs_rule=vs_rule,
        )
        state.history.append(row)
        if checkpoint is not None:
            state.write(checkpoint)
        if observer is not None:
            observer(row, [finding for finding in findings(state.history) if finding.signature not in known])
    # the best version by validation, with its scores on seeds that chose nothing
    own_s, rule_s = (times(policy, SCORE_SEEDS, plan.num_score_seeds) for policy in (state.best, b""))
    ratios = {
        f"vs_rule/{name}": geometric_mean(own / rule for own, rule in zip(own_s[name], rule_s[name], strict=True))
        for name in own_s
    }
    scores = {**ratios, "vs_rule": geometric_mean(ratios.values()), "num_runs": float(sum(map(len, own_s.values())))}
    file = PolicyFile.from_bytes(state.best)
    metadata = msgspec.structs.replace(file.metadata, scores=scores, num_episodes=0)
    return LearningResult(PolicyFile(metadata, file.tensors), state.history)


def _surrogate_tasks(plan: LearningPlan, update: int, policy: bytes) -> list[SurrogateTask]:
    """Jobs that train in step have as many workers and steps per window.

    Of such groups the largest takes part in each update, and one other in turn, with the jobs of all others.
    """
    alike: dict[tuple[int, int], list[Scenario]] = {}
    for scenario in plan.learned_from:
        alike.setdefault((scenario.world_size, scenario.window_steps), []).append(scenario)
    first, *others = sorted(alike.values(), key=len, reverse=True)
    groups = [(first, len(first))]
    if others:
        groups.append((others[update % len(others)], sum(map(len, others))))
    return [
        SurrogateTask(
            scenarios=tuple(scenarios),
            num_jobs=plan.jobs_per_scenario * count,
            seed=2 * (plan.seed * SEEDS_PER_LEARNING + update) + number,
            policy=policy,
            num_windows=plan.windows_per_job,
            weights=plan.weights if plan.formula != "time-aware" else None,
        )
        for number, (scenarios, count) in enumerate(groups)
    ]
