"""The plan of a learning run: everything that determines the outcome, and nothing else."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dynamix.arbitrator.learned.actions import LearnedSetName
from dynamix.arbitrator.learned.ppo_settings import PAPER, PPOSettings
from dynamix.arbitrator.policies.registry import policy_names
from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import TIME_ONLY, Formula, Weights
from dynamix.schemas.messages.fields import Token
from dynamix.schemas.policies import STIGMERGY


def resized(scenario: Scenario, num_workers: int, ranks_per_node: int | None = None) -> Scenario:
    """The scenario with this number of workers, drawn evenly from its own in their order; its name has the number.

    With fewer workers than it has some kinds may be missing, with more each comes again in proportion.

    Raises:
        ValueError: when it names a worker that is not there then.
    """
    present = scenario.per_worker
    chosen = [present[(2 * index + 1) * len(present) // (2 * num_workers)] for index in range(num_workers)]
    return msgspec.structs.replace(
        scenario,
        name=f"{scenario.name}-of-{num_workers}",
        workers=tuple(msgspec.structs.replace(workers, count=1) for workers in chosen),
        ranks_per_node=scenario.ranks_per_node if ranks_per_node is None else ranks_per_node,
    )


AtLeastOne = Annotated[int, Meta(ge=1)]
TRAINING_SEEDS, VALIDATION_SEEDS, SCORE_SEEDS = 1_000_000, 500_000, 600_000
"""Where the seeds of episodes begin: to learn from, to choose the best version by, to score it with. They are
disjoint, also from those of an evaluation, which count from 0."""
SEEDS_PER_LEARNING = 100_000


class LearningPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A learning run; equal plans give bit-equal policies on one machine."""

    policy: Token
    """The name of what is learned."""
    scenarios: tuple[Scenario, ...]
    """Scenarios with `learn = true` are learned from, in turn."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    action_set: LearnedSetName = "global"
    settings: PPOSettings = PPOSettings()
    formula: Formula | None = "time-aware"
    """`None`: the published one for each scenario's optimizer."""
    weights: Weights = TIME_ONLY
    """Weights of the reward; for `time-aware` beta is per time that `rule` takes to the target in the scenario, so that
    fast and slow clusters weigh the same."""
    episode_end: Literal["target", "fixed"] = "target"
    """`target`: an episode ends with the target, after which nothing is lost or won. `fixed`: after the time that
    `rule` takes to the target, whatever was reached; what has not reached it by then counts as a miss."""
    curriculum: tuple[AtLeastOne, ...] = ()
    """Numbers of workers: learning goes on with each of them for an equal part of the updates, in this order, and is
    judged by the last. Without any the scenarios are as they are."""
    num_episodes: AtLeastOne = 800
    episodes_per_update: AtLeastOne = 16
    validate_every: AtLeastOne = 10
    """Updates between two validations."""
    num_validation_seeds: AtLeastOne = 2
    num_score_seeds: AtLeastOne = 4
    select: Literal["best", "last"] = "best"
    """Which version is handed out: the best by validation, time to target against `rule`, or the last."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid plan: no scenario to learn from, a name or seeds in use."""
        if (self.policy == STIGMERGY) != (self.action_set == "appetite"):
            raise ValueError(
                f"policy {self.policy!r} with action_set={self.action_set!r}: what agents learn is {STIGMERGY!r} with "
                "'appetite', and no other policy has these actions"
            )
        if self.policy in policy_names() and self.policy != STIGMERGY:
            raise ValueError(f"{self.policy!r} is the name of a policy in code: give the learned one another name")
        if self.num_episodes > SEEDS_PER_LEARNING:
            raise ValueError(
                f"num_episodes={self.num_episodes}: at most {SEEDS_PER_LEARNING}, or their seeds are those of seed "
                f"{self.seed + 1}"
            )
        if not self.learned_from:
            names = ", ".join(scenario.name for scenario in self.scenarios) or "none"
            raise ValueError(f"no scenario to learn from: one with learn = true is needed, there are {names}")

    @property
    def learned_from(self) -> tuple[Scenario, ...]:
        """The scenarios that may be learned from."""
        return tuple(scenario for scenario in self.scenarios if scenario.learn)

    @property
    def stages(self) -> tuple[tuple[Scenario, ...], ...]:
        """The scenarios of each stage; agents have a node each."""
        if not self.curriculum:
            return (self.learned_from,)
        ranks_per_node = 1 if self.action_set == "appetite" else None
        return tuple(
            tuple(resized(scenario, number, ranks_per_node) for scenario in self.learned_from)
            for number in self.curriculum
        )

    def scenario_of(self, episode: int) -> Scenario:
        """The scenario of an episode: those of its stage in turn."""
        stages = self.stages
        scenarios = stages[episode // self.episodes_per_update * len(stages) // self.num_updates]
        return scenarios[episode % len(scenarios)]

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, by which a checkpoint is matched."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    @property
    def num_updates(self) -> int:
        """The last one may have fewer episodes."""
        return -(-self.num_episodes // self.episodes_per_update)

    def episodes_of(self, update: int) -> range:
        """Numbers of the episodes that an update learns from."""
        first = update * self.episodes_per_update
        return range(first, min(first + self.episodes_per_update, self.num_episodes))

    def training_seed(self, episode: int) -> int:
        """Return the seed of an episode, unique over episodes and over learning runs."""
        return TRAINING_SEEDS + self.seed * SEEDS_PER_LEARNING + episode


PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "ppo": {},
        "ppo-paper": {
            "action_set": "deltas",
            "settings": PAPER,
            "formula": None,
            "weights": Weights(),
            "num_episodes": 120,
            "episodes_per_update": 1,
            "validate_every": 30,
            "select": "last",
        },
        STIGMERGY: {
            "action_set": "appetite",
            "curriculum": (2, 8, 32),
            "num_episodes": 480,
            "episodes_per_update": 8,
            "num_validation_seeds": 1,
            "num_score_seeds": 2,
        },
    }
)
"""`ppo`: a bounded residual on `rule`. `ppo-paper`: as published, as far as it is published: per-worker deltas, the
simplified objective, an update at the end of each episode, the published reward. `stigmergy`: a bounded residual on the
wish of each agent, with one network for all of them and a curriculum over their number."""


def plan_named(policy: str, scenarios: tuple[Scenario, ...], **changes: object) -> LearningPlan:
    """The preset of a policy's name with changes; another name has the preset of `ppo`.

    Raises:
        ValueError: when a value cannot be used; the text names it.
    """
    fields: dict[str, object] = {"policy": policy, "scenarios": scenarios}
    fields |= {**PRESETS.get(policy, PRESETS["ppo"]), **changes}
    try:
        return msgspec.convert(fields, LearningPlan)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ValueError(f"{name}={fields[name]!r}: {reason}" if name in fields else str(error)) from error
