"""One update in a separate process: recordings and a policy file in, the next version out."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamix.arbitrator.learned.actions import ActionSetName
from dynamix.arbitrator.learned.policy_file import PolicyFile, PolicyMetadata
from dynamix.arbitrator.learned.ppo_settings import Objective, PPOSettings
from dynamix.runtime.die_with_parent import begin_worker

from .rollout import End, Recording, RolloutError, trajectory_of

MAX_REMEMBERED = 1000
"""Names of generations learned from that a policy file keeps, so that a restarted learner learns from none twice."""
AUTO = "auto"
"""The published formula of each job's optimizer."""
_SEPARATOR = ", "


class Lesson(NamedTuple):
    """A generation to learn from."""

    name: str
    recording: Recording
    terminated: bool


class Outcome(NamedTuple):
    """The result of an update."""

    content: bytes | None
    """The next version's file; `None` when no lesson could be used."""
    returns: list[float]
    explained_variance: float
    approx_kl: float
    refused: list[str]
    """Lessons that could not be used, each with the reason."""


def first_version(
    policy: str, action_set: ActionSetName, objective: Objective, seed: int, reward_formula: str = AUTO
) -> bytes:
    """The file of an untrained policy."""
    from .agent import Agent  # noqa: PLC0415 - torch: only in this process

    settings = PPOSettings(objective=objective)
    metadata = PolicyMetadata.of(
        action_set=action_set,
        policy=policy,
        algorithm=objective,
        hidden_sizes=settings.hidden_sizes,
        reward_formula=reward_formula,
        seeds=(seed,),
    )
    return Agent.new(metadata, settings).file().to_bytes()


def update(content: bytes, lessons: Sequence[Lesson]) -> Outcome:
    """The next version of a policy, after one update from all lessons that can be used."""
    from .agent import Agent  # noqa: PLC0415 - torch: only in this process

    file = PolicyFile.from_bytes(content)
    action_set = file.metadata.make_action_set()
    trajectories, used, refused = [], [], []
    for lesson in lessons:
        try:
            trajectories.append(trajectory_of(lesson.recording, action_set, End(terminated=lesson.terminated)))
            used.append(lesson)
        except RolloutError as error:
            refused.append(str(error))
    if not trajectories:
        return Outcome(None, [], float("nan"), 0.0, refused)
    agent, names = Agent.of(file), [lesson.name for lesson in used]
    try:
        learned = agent.learn(trajectories)
        version = agent.file(
            parent=file.digest,
            learned_from=(*file.metadata.learned_from, *names)[-MAX_REMEMBERED:],
            reward_formula=formula_after(file.metadata, [lesson.recording for lesson in used]),
            reward_weights={},  # rewards on the bus name their formula, not its weights
            scores={},
        ).to_bytes()
        PolicyFile.from_bytes(version, "what an update made")
    except (ArithmeticError, RuntimeError, ValueError) as error:  # torch's for numbers that are too large
        # no version: learning from these must not end the learner, again after each restart
        return Outcome(None, [], float("nan"), 0.0, [*refused, f"{', '.join(names)}: {error}"])
    returns = [trajectory.total_reward for trajectory in trajectories]
    return Outcome(version, returns, learned.explained_variance, learned.stats.approx_kl, refused)


def foreign_formulas(metadata: PolicyMetadata, recording: Recording) -> list[str]:
    """The formulas of a generation's rewards that are not the policy's, sorted."""
    own = set(metadata.reward_formula.split(_SEPARATOR))
    if AUTO in own:
        own.add(f"paper-{recording.job.optimizer_family}")
    return sorted({reward.formula for reward in recording.rewards} - own)


def formula_after(metadata: PolicyMetadata, recordings: Iterable[Recording]) -> str:
    """The reward formula of a policy once it has learned from these generations as well."""
    foreign = {formula for recording in recordings for formula in foreign_formulas(metadata, recording)}
    return _SEPARATOR.join(sorted({*metadata.reward_formula.split(_SEPARATOR), *foreign}))


def begin(parent: int) -> None:
    """Prepare the process: one thread, for equal bits, and an end with its parent."""
    begin_worker(parent)
    import torch  # noqa: PLC0415 - see above

    torch.set_num_threads(1)
