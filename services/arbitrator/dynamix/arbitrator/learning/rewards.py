"""Whether the rewards of live jobs are those that a policy learns by. Pure."""

from collections.abc import Iterable

from dynamix.arbitrator.learned.policy_file import PolicyMetadata

from .rollout import Recording

AUTO = "auto"
"""The published formula of each job's optimizer."""
_SEPARATOR = ", "


def foreign_formulas(metadata: PolicyMetadata, recording: Recording) -> list[str]:
    """The formulas of a generation's rewards that are not the policy's, sorted."""
    own = set(metadata.reward_formula.split(_SEPARATOR))
    if AUTO in own:
        own.add(f"paper-{recording.job.optimizer_family}")
    return sorted({reward.formula for reward in recording.rewards} - own)


def formula_after(metadata: PolicyMetadata, recordings: Iterable[Recording]) -> str:
    """What a policy says of its rewards once it has learned from these generations as well."""
    foreign = {formula for recording in recordings for formula in foreign_formulas(metadata, recording)}
    return _SEPARATOR.join(sorted({*metadata.reward_formula.split(_SEPARATOR), *foreign}))
