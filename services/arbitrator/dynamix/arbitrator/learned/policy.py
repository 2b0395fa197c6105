"""Learned policies (`ppo`, `ppo-paper` and others): features of the state, a network, and what its choices mean.

A network sees the state free of scale: sizes are doublings, times are shares of the step or ratios to the mean over
ranks, so that what was learned on eight slow workers is worth something on a hundred fast ones. Unknown is NaN, which
the normalisation turns into a bit. The network is evaluated in numpy, and the likeliest action is taken. With the job's
option `explore` 1 it is drawn instead, and the decision carries log-probabilities and values for learning.

A policy has one of two action sets:

`deltas`   one choice per rank: the published change of its local batch size, split `fixed` (method section 2).
`global`   one choice per job: a bounded multiplier on the global batch of `rule`, divided as the rule divides.

Of equal logits the first choice wins, and the first is the neutral one: an untrained network changes nothing.
"""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from dynamix.arbitrator.policies.baselines import DELTAS as DRAWN_DELTAS
from dynamix.arbitrator.policies.baselines import keyed_generator
from dynamix.arbitrator.policies.policy import (
    Array32,
    Array64,
    Decision,
    decided_sizes,
    option,
    pack,
    unpack,
)
from dynamix.arbitrator.policies.rule import Rule
from dynamix.arbitrator.policies.step_time import divided
from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import VERSION, VERSION_OPTION, Options, switch

from .policy_file import (
    ActionSetName,
    Choices,
    Forward,
    Normalisation,
    PolicyFile,
    PolicyFileError,
    PolicyMetadata,
    log_softmax,
    sample,
)

Columns = Mapping[str, Array64]
Input = Callable[[Columns], Array64]

RANK_INPUTS: Mapping[str, Input] = {
    "size_log2": lambda seen: _log2(seen["decided"]),
    "size_to_mean_log2": lambda seen: _log2(_to_mean(seen["decided"])),
    "room_above_log2": lambda seen: _log2(_ratio(seen["max_local_batch_size"], seen["decided"])),
    "room_below_log2": lambda seen: _log2(_ratio(seen["decided"], seen["min_local_batch_size"])),
    "running_to_decided_log2": lambda seen: _log2(_ratio(seen["local_batch_size"], seen["decided"])),
    "pending_to_decided_log2": lambda seen: _log2(_ratio(seen["pending_local_batch_size"], seen["decided"])),
    "compute_share": lambda seen: _ratio(seen["compute_time_s"], seen["step_time_s"]),
    "sync_share": lambda seen: _ratio(seen["sync_time_s"], seen["step_time_s"]),
    "data_share": lambda seen: _ratio(seen["data_time_s"], seen["step_time_s"]),
    "compute_to_mean_log2": lambda seen: _log2(_to_mean(seen["compute_time_s"])),
    "rate_to_mean_log2": lambda seen: _log2(_to_mean(_ratio(seen["num_samples"], seen["compute_time_s"]))),
    "accuracy": itemgetter("accuracy"),
    "accuracy_change": itemgetter("accuracy_change"),
    "loss_to_job_log2": lambda seen: _log2(_to_mean(seen["loss"])),
    "tx_to_mean_log2": lambda seen: _log2(_to_mean(seen["tx_bytes_per_s"])),
    "retransmits_log2": lambda seen: np.log2(1 + seen["retransmits"]),
    "srtt_us_log2": lambda seen: _log2(seen["srtt_us"]),
    "cpu_time_ratio": itemgetter("cpu_time_ratio"),
    "memory_ratio": itemgetter("memory_ratio"),
    "load_per_cpu": itemgetter("load_per_cpu"),
    "age_windows": itemgetter("age_windows"),
}
"""Inputs of one rank; `_log2` is in doublings, `_share` a share of the step, `_to_mean` against the mean over ranks."""

GLOBAL_INPUTS: Mapping[str, Input] = {
    "loss_log2": lambda seen: _log2(seen["loss"]),
    "loss_change_ratio": lambda seen: _ratio(seen["loss_change"], seen["loss"]),
    "accuracy": itemgetter("accuracy"),
    "accuracy_change": itemgetter("accuracy_change"),
    "held_out_accuracy": itemgetter("held_out_accuracy"),
    "progress": itemgetter("progress"),
    "batch_to_base_log2": lambda seen: _log2(_ratio(seen["decided"], seen["base_global_batch_size"])),
    "batch_to_noise_log2": lambda seen: _log2(_ratio(seen["decided"], seen["noise_scale"])),
    "running_to_decided_log2": lambda seen: _log2(_ratio(seen["global_batch_size"], seen["decided"])),
    "step_time_s_log2": lambda seen: _log2(seen["step_time_s"]),
    "throughput_log2": lambda seen: _log2(seen["throughput"]),
    "world_size_log2": lambda seen: _log2(seen["world_size"]),
    "windows_log2": lambda seen: _log2(seen["num_windows"]),
    "is_adam": itemgetter("is_adam"),
}
"""Inputs of the whole job; each column has one row."""

_POOLS = ("mean", "min", "max")
"""Functions that pool the inputs of any number of ranks into one row."""
_JOB_INPUTS = tuple(f"job_{name}" for name in GLOBAL_INPUTS)
INPUTS: Mapping[ActionSetName, tuple[str, ...]] = {
    "deltas": (*RANK_INPUTS, *_JOB_INPUTS),
    "global": (
        *(f"{pool}_{name}" for pool in _POOLS for name in RANK_INPUTS),
        *_JOB_INPUTS,
        *("rule_to_decided_log2", "last_multiplier_log2"),  # what the rule would do; what was last applied to it
    ),
}
"""Names of all inputs of one decision, in order."""
DELTAS = tuple(sorted(DRAWN_DELTAS, key=lambda delta: (abs(delta), delta)))
"""Samples; the published set, the neutral one first."""
MULTIPLIERS = (1.0, 0.85, 1.2, 0.7, 1.4, 0.5, 2.0)
"""About symmetric in doublings, at most one doubling, the neutral one first."""
ACTIONS: Mapping[ActionSetName, tuple[float, ...]] = {
    "deltas": tuple(map(float, DELTAS)),
    "global": MULTIPLIERS,
}
"""The actions of each set, the neutral one first."""


def metadata_of(action_set: ActionSetName, **fields: Any) -> PolicyMetadata:
    """Metadata of a policy of this program: its inputs and actions are filled in."""
    return PolicyMetadata(action_set=action_set, inputs=INPUTS[action_set], actions=ACTIONS[action_set], **fields)


def rank_inputs(job: Job, obs_WF: Array32) -> Array32:
    """Ranks x `RANK_INPUTS`, NaN where unknown."""
    seen = {name: obs_WF[:, at].astype(np.float64) for name, at in RANK_INDEX.items()}
    seen["decided"] = seen["decided_local_batch_size"]
    seen["max_local_batch_size"] = np.asarray(job.max_local_batch_sizes, dtype=np.float64)
    seen["min_local_batch_size"] = np.full(job.world_size, float(max(1, job.min_local_batch_size)))
    return np.stack([make(seen) for make in RANK_INPUTS.values()], axis=1).astype(np.float32)


def global_inputs(job: Job, window: int, obs_WF: Array32, global_F: Array32) -> Array32:
    """The values of `GLOBAL_INPUTS`, NaN where unknown."""
    numbers = {
        "decided": obs_WF[:, RANK_INDEX["decided_local_batch_size"]].astype(np.float64).sum(),
        "base_global_batch_size": job.base_global_batch_size,
        "world_size": job.world_size,
        "num_windows": 1 + window,
        "is_adam": job.optimizer_family == "adam",
        **{name: global_F[at] for name, at in GLOBAL_INDEX.items()},
    }
    seen = {name: np.array([number], dtype=np.float64) for name, number in numbers.items()}
    return np.concatenate([make(seen) for make in GLOBAL_INPUTS.values()]).astype(np.float32)


def pooled(job: Job, obs_WF: Array32) -> Array32:
    """One number per pool and rank input, ordered as in `names`: over the ranks where it is known, NaN without any."""
    inputs_WR = rank_inputs(job, obs_WF)
    known = ~np.isnan(inputs_WR)
    count = known.sum(axis=0)
    pools = (
        np.where(known, inputs_WR, 0).sum(axis=0, dtype=np.float64) / np.maximum(count, 1),
        np.where(known, inputs_WR, np.inf).min(axis=0),
        np.where(known, inputs_WR, -np.inf).max(axis=0),
    )
    return np.concatenate([np.where(count > 0, pool, np.nan) for pool in pools]).astype(np.float32)


def _ratio(over: Array64, under: Array64) -> Array64:
    """NaN where the divisor is not positive or either is unknown."""
    result = np.full(len(over), np.nan)
    np.divide(over, under, out=result, where=under > 0)
    return result


def _to_mean(values: Array64) -> Array64:
    known = ~np.isnan(values)
    mean = values[known].mean() if known.any() else np.nan
    return _ratio(values, np.full_like(values, mean))


def _log2(values: Array64) -> Array64:
    """NaN where the value is not positive or unknown."""
    result = np.full(len(values), np.nan)
    np.log2(values, out=result, where=values > 0)
    return result


class Situation(NamedTuple):
    """Input of a network for one window."""

    inputs_DI: Array32
    """Decisions x inputs, NaN where unknown. D is the number of ranks, or 1 for the whole job."""
    base: Decision
    """The decision of the neutral choice."""


class Deltas:
    """Changes each rank's own last size by one of `DELTAS`."""

    name: ActionSetName = "deltas"
    options: ClassVar[Options] = {}

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:  # noqa: ARG002 - what it needs to know of the past is in the observation
        """Inputs with one row per rank: its own, then the job's."""
        shared = global_inputs(job, window, obs_WF, global_F)
        own = rank_inputs(job, obs_WF)
        rows = np.concatenate([own, np.broadcast_to(shared, (len(own), len(shared)))], axis=1)
        return Situation(rows, Decision(Allocation(decided_sizes(obs_WF))))

    def decision(self, job: Job, situation: Situation, choices_D: Choices) -> Decision:
        """Last sizes plus deltas, within the job's bounds; the carry is one byte per rank."""
        wanted = np.asarray(situation.base.allocation.local_batch_sizes) + np.array(DELTAS)[choices_D]
        sizes = np.clip(wanted, job.min_local_batch_size, job.max_local_batch_sizes)
        return Decision(Allocation(tuple(sizes.tolist())), carry=choices_D.astype(np.uint8).tobytes())

    def choices(self, job: Job, carry: bytes) -> Choices:
        """The last choice of each rank; neutral if the carry holds none."""
        if len(carry) != job.world_size:
            return np.zeros(job.world_size, dtype=np.int64)
        return np.frombuffer(carry, dtype=np.uint8).astype(np.int64)


class _Kept(msgspec.Struct, array_like=True):
    """The carry of `global`."""

    choice: int = 0
    rule_total: int | None = None
    """The rule's last global batch; `None` before its first decision."""
    rule: bytes = b""
    """The rule's carry."""


class GlobalLever:
    """Multiplies the global batch of `rule`, which is given its own past and never sees the multiplier.

    The carry holds the choice, the rule's last global batch and its carry: what the rule would do next does not
    depend on how it was overruled, so that the multipliers do not compound.
    """

    name: ActionSetName = "global"

    def __init__(self) -> None:
        self._rule = Rule()
        self.options: Options = self._rule.options

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:
        """Inputs with one row: the ranks' pooled, the job's, and the rule's decision."""
        kept = unpack(_Kept, carry)
        as_left, decided = obs_WF, decided_sizes(obs_WF)
        if kept.rule_total not in (None, sum(decided)):  # the same division, but the rule's own global batch
            as_left = obs_WF.copy()
            weights = np.asarray(decided, dtype=np.float64)
            as_left[:, RANK_INDEX["decided_local_batch_size"]] = divided(job, kept.rule_total, weights)
        base = self._rule.decide(job, window, as_left, global_F, kept.rule)
        sizes = np.clip(base.allocation.local_batch_sizes, job.min_local_batch_size, job.max_local_batch_sizes)
        base = base._replace(allocation=base.allocation.with_sizes(tuple(sizes.tolist())))
        lever = np.log2([max(1, sizes.sum()) / max(1, sum(decided)), MULTIPLIERS[_choice(kept)]])
        pools, shared = pooled(job, obs_WF), global_inputs(job, window, obs_WF, global_F)
        return Situation(np.concatenate([pools, shared, lever.astype(np.float32)])[None], base)

    def decision(self, job: Job, situation: Situation, choices_D: Choices) -> Decision:
        """The rule's decision, its global batch multiplied; exactly the rule's where the multiplier is 1."""
        base, choice = situation.base, int(choices_D[0])
        allocation, total = base.allocation, base.allocation.global_batch_size
        if MULTIPLIERS[choice] != 1:
            proportions = np.asarray(allocation.local_batch_sizes, dtype=np.float64)
            allocation = allocation.with_sizes(divided(job, round(total * MULTIPLIERS[choice]), proportions))
        return base._replace(allocation=allocation, carry=pack(_Kept(choice, total, base.carry)))

    def choices(self, job: Job, carry: bytes) -> Choices:  # noqa: ARG002 - one for the whole job
        """One; neutral where the carry holds none."""
        return np.array([_choice(unpack(_Kept, carry))], dtype=np.int64)


def _choice(kept: _Kept) -> int:
    return kept.choice if 0 <= kept.choice < len(MULTIPLIERS) else 0


ActionSet = Deltas | GlobalLever
"""Between a job's observation and a network that only knows numbered choices. `options` are those of a job that it
understands; `situation` has the arguments of `Policy.decide`."""


def action_set_of(metadata: PolicyMetadata) -> ActionSet:
    """The action set that a network was learned with.

    Raises:
        PolicyFileError: when this program has other inputs or actions.
    """
    name = metadata.action_set
    for what, theirs, ours in (
        ("inputs", metadata.inputs, INPUTS[name]),
        ("actions", metadata.actions, ACTIONS[name]),
    ):
        if theirs != ours:
            unknown = ", ".join(str(one) for one in theirs if one not in ours) or "fewer, or in another order"
            raise PolicyFileError(
                f"policy {metadata.policy!r}: its {what} are not those of this program ({unknown}): use the "
                "dynamix-batch that wrote it, or learn the policy again"
            )
    return Deltas() if name == "deltas" else GlobalLever()


OPTIONS: Options = {
    "explore": switch(0, "1: sample actions, for learning; 0: take the likeliest"),
    VERSION_OPTION: VERSION,
}
"""The options of every learned policy; one that scales the rule has the rule's as well."""


class LearnedPolicy:
    """A policy that decides with the network of a file; pure like every policy."""

    def __init__(self, file: PolicyFile, *, name: str = "", version: int = 1, explore: bool = False) -> None:
        """Prepare the network; `name` replaces the file's, `explore` samples even where the job does not ask for it.

        Raises:
            PolicyFileError: as `action_set_of`.
        """
        self.name = name or file.metadata.policy
        self.version = version
        self.digest = bytes.fromhex(file.digest)
        self.action_set = action_set_of(file.metadata)
        self.options: Options = {**OPTIONS, **self.action_set.options}
        self._explore = explore
        self._forward = Forward(file.tensors, len(file.metadata.settings.hidden_sizes))
        self._normalisation = Normalisation.of_tensors(file.tensors)

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """The network's choice in this situation."""
        situation = self.action_set.situation(job, window, obs_WF, global_F, carry)
        inputs = self._normalisation.applied(situation.inputs_DI)
        logits_DA = self._forward.logits(inputs)
        explores = self._explore or option(self.options, job, "explore") == 1
        how = "drawn from the network's actions, to learn" if explores else "the network's likeliest action"
        reason = f"{how}; without it: {situation.base.reason}" if situation.base.reason else how
        if not explores:
            return self.action_set.decision(job, situation, logits_DA.argmax(axis=1))._replace(reason=reason)
        logprobs_DA = log_softmax(logits_DA)
        choices_D = sample(logprobs_DA, keyed_generator(job, window, "explore:").random(len(logprobs_DA)))
        chosen_D, values_D = logprobs_DA[np.arange(len(choices_D)), choices_D], self._forward.values(inputs)
        decision = self.action_set.decision(job, situation, choices_D)
        return decision._replace(logprobs=tuple(chosen_D.tolist()), values=tuple(values_D.tolist()), reason=reason)
