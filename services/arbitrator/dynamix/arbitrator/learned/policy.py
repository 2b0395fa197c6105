"""Learned policies (`ppo`, `ppo-paper` and others): features of the state, a network, and what its choices mean.

The network is evaluated in numpy, and the likeliest action is taken. With the job's option `explore` 1 it is drawn
instead, and the decision carries log-probabilities and values for learning. Of equal logits the first choice wins, and
the first is the neutral one: an untrained network changes nothing. Unknown is NaN, which the normalisation turns into a
bit. A policy has one of two action sets:

`deltas`   as published (method section 2): one choice per rank, a change of its size, by the published state.
`levers`   three choices per job: a factor on the global batch, one on the steps between averagings, another codec. No
           model of the job is inside: the ranks divide the batch by speed, and all else is learned.

What `levers` sees is free of scale, and has a history of windows. Inputs and effects are functions of arrays with a row
per job, so that a simulator of many jobs (`lab.learning.surrogate`) shares them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from dynamix.arbitrator.policies.baselines import DELTAS as DRAWN_DELTAS
from dynamix.arbitrator.policies.baselines import keyed_generator
from dynamix.arbitrator.policies.policy import (
    Array32,
    Array64,
    Decision,
    allocation_of,
    column,
    decided_sizes,
    option,
    pack,
    unpack,
)
from dynamix.arbitrator.policies.step_time import divided
from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation, Exchange
from dynamix.schemas.policies import VERSION, VERSION_OPTION, Options, switch, track

from .policy_file import (
    ActionSetName,
    Choices,
    Network,
    PolicyFile,
    PolicyFileError,
    PolicyMetadata,
)

Columns = Mapping[str, Array64]
"""Features by name, as `schemas.features` names them: of ranks with a column per rank, of jobs with one."""

# --- the published state and actions

PUBLISHED: Mapping[str, Callable[[Columns], Array64]] = {
    "size_log2": lambda seen: _log2(seen["decided_local_batch_size"]),
    "step_time_s_log2": lambda seen: _log2(seen["step_time_s"]),
    "accuracy": lambda seen: seen["accuracy"],
    "accuracy_change": lambda seen: seen["accuracy_change"],
    "sigma_norm": lambda seen: np.minimum(seen["sigma_norm"], 10.0),
    "sigma_norm_sq": lambda seen: np.minimum(seen["sigma_norm_sq"], 100.0),
    "cpu_time_ratio": lambda seen: seen["cpu_time_ratio"],
    "memory_ratio": lambda seen: seen["memory_ratio"],
    "tx_bytes_per_s_log2": lambda seen: _log2(seen["tx_bytes_per_s"]),
    "retransmits_log2": lambda seen: np.log2(1 + seen["retransmits"]),
    "job_loss": lambda seen: seen["job_loss"],
    "job_accuracy": lambda seen: seen["job_accuracy"],
    "job_held_out_accuracy": lambda seen: seen["job_held_out_accuracy"],
    "job_progress": lambda seen: seen["job_progress"],
}
"""The published state of a rank (method section 2); those of the job are equal on all ranks."""

DELTAS = tuple(float(delta) for delta in sorted(DRAWN_DELTAS, key=lambda delta: (abs(delta), delta)))
"""Samples; the published set, the neutral one first."""


def published_inputs(seen: Columns) -> Array32:
    """Ranks of all jobs x `PUBLISHED`."""
    return np.stack([make(seen).ravel() for make in PUBLISHED.values()], axis=1).astype(np.float32)


# --- levers

SIZES = (1.0, 0.5, 2**-0.5, 2**0.5, 2.0)
"""Factors on the global batch."""
PERIODS = (1.0, 0.5, 2.0)
"""Factors on the steps between two averagings."""
LONGEST_PERIOD = 8
CODECS = (0.0, 1.0)
"""Whether to change between gradients as they are and `int8`."""
NUM_PAST = 4
"""Windows before the newest that are seen as well."""
LAG = 2
"""Windows after which a decision takes effect."""
_PAST = ("batch", "step", "compute_share", "sync_share", "every_log2", "is_int8")
_SLOPE_DECAY, _SLOPE_PRIOR = 0.9, 0.05
"""Weight that older changes keep with each window, and that of an elasticity of 1/2."""
EMPTY_MEMORY = np.append(np.full(NUM_PAST * len(_PAST), np.nan), np.zeros(3))
"""Memory of the windows of one job, before the first: `_PAST` of each, the newest first; and sums over changes of
B and of the step's time T from window to window, in logarithms: dB dB, dB dT, dT dT."""

NOW = (
    *("batch_to_base_log2", "batch_to_noise_log2", "room_above_log2", "room_below_log2", "decided_to_batch_log2"),
    *("every_log2", "is_int8", "decided_every_log2", "decided_is_int8"),
    *("compute_share", "most_compute_share", "least_sync_share", "most_sync_share"),
    *("step_elasticity", "step_change"),
    *("world_size_log2", "windows_log2", "permits_rounding", "permits_local", "is_adam"),
)
INPUTS: Mapping[ActionSetName, tuple[str, ...]] = {
    "deltas": tuple(PUBLISHED),
    "levers": (*NOW, *(f"{name}_{age}_before" for age in range(1, NUM_PAST + 1) for name in _PAST)),
}
"""Names of all inputs of one decision, in order; `_share` is of the step, and what was before is over what is now."""
ACTIONS: Mapping[ActionSetName, tuple[tuple[float, ...], ...]] = {
    "deltas": (DELTAS,),
    "levers": (SIZES, PERIODS, CODECS),
}
"""The actions of each set by lever, the neutral one first."""


class Levers(NamedTuple):
    """Positions of the levers of E jobs."""

    batch: Array64
    every: Array64
    is_int8: Array64
    """1 or 0."""

    def moved(self, choices_EL: Choices, facts: Columns) -> "Levers":
        """The positions after these choices, as far as the jobs permit them."""
        size, period, codec = choices_EL.T
        batch = np.clip(self.batch * np.array(SIZES)[size], facts["smallest"], facts["largest"])
        every = np.clip(self.every * np.array(PERIODS)[period], 1, LONGEST_PERIOD)
        is_int8 = np.abs(self.is_int8 - np.array(CODECS)[codec])
        return Levers(
            np.rint(batch), np.where(facts["permits_local"] > 0, every, 1.0), is_int8 * facts["permits_rounding"]
        )


def lever_inputs(
    seen: Columns, active: Levers, decided: Levers, facts: Columns, memory_EM: Array64
) -> tuple[Array32, Array64]:
    """Jobs x inputs of `levers`, and their memory after the newest window.

    Args:
        seen: what the newest window showed: `num_samples`, `compute_time_s`, `sync_time_s` and `step_time_s` of ranks,
            `noise_scale` of jobs.
        active: the positions in that window.
        decided: those that were decided last.
        facts: what stays: bounds, permissions, the optimizer; and the number of windows so far.
        memory_EM: as `EMPTY_MEMORY`, a row per job.
    """
    batch, every, is_int8 = active
    step_s = np.nanmax(seen["step_time_s"], axis=1, initial=-np.inf)
    step_s = np.where(step_s > 0, step_s, np.nan)
    share, waits = seen["compute_time_s"] / step_s[:, None], seen["sync_time_s"] / step_s[:, None]
    pooled = [_pool(np.mean, share), _pool(np.max, share), _pool(np.min, waits), _pool(np.max, waits)]
    newest_EK = np.stack([batch, step_s, pooled[0], pooled[2], np.log2(every), is_int8], axis=1)
    past_EPK = memory_EM[:, :-3].reshape(len(batch), NUM_PAST, -1)

    # the elasticity of the step's time: where the exchange stayed, changes of B and of T from window to window
    grown_E2 = np.log2(newest_EK[:, :2] / past_EPK[:, 0, :2])
    is_same = np.isclose(newest_EK[:, 4:], past_EPK[:, 0, 4:]).all(axis=1)  # a carry holds float32
    is_pair = np.isfinite(grown_E2).all(axis=1) & is_same
    dB, dT = np.where(is_pair[:, None], grown_E2, 0.0).T
    sums_E3 = np.where(is_pair, _SLOPE_DECAY, 1.0)[:, None] * memory_EM[:, -3:]
    sums_E3 = sums_E3 + np.stack([dB * dB, dB * dT, dT * dT], axis=1)
    elasticity = (sums_E3[:, 1] + 0.5 * _SLOPE_PRIOR) / (sums_E3[:, 0] + _SLOPE_PRIOR)

    now = {
        "batch_to_base_log2": _log2(batch / facts["base"]),
        "batch_to_noise_log2": _log2(batch / np.where(seen["noise_scale"] > 0, seen["noise_scale"], np.nan)),
        "room_above_log2": _log2(facts["largest"] / decided.batch),
        "room_below_log2": _log2(decided.batch / facts["smallest"]),
        "decided_to_batch_log2": _log2(decided.batch / batch),
        "every_log2": np.log2(every),
        "is_int8": is_int8,
        "decided_every_log2": np.log2(decided.every),
        "decided_is_int8": decided.is_int8,
        **dict(zip(NOW[9:13], pooled, strict=True)),
        "step_elasticity": elasticity,
        "step_change": np.sqrt(sums_E3[:, 2]),
        **{name: facts[name] for name in NOW[15:]},
    }
    before_EPK = past_EPK.copy()
    before_EPK[..., :2] = np.log2(before_EPK[..., :2] / newest_EK[:, None, :2])
    inputs_EI = np.concatenate([np.stack([now[name] for name in NOW], axis=1), before_EPK.reshape(len(batch), -1)], 1)
    kept_EPK = np.concatenate([newest_EK[:, None], past_EPK[:, :-1]], axis=1)
    return inputs_EI.astype(np.float32), np.concatenate([kept_EPK.reshape(len(batch), -1), sums_E3], axis=1)


def _pool(statistic: Callable[..., Any], values_EW: Array64) -> Array64:
    """Over the ranks of each job that are known."""
    if not np.isnan(values_EW).any():
        pooled: Array64 = statistic(values_EW, axis=1)
        return pooled
    return np.array([statistic(row[~np.isnan(row)]) if (~np.isnan(row)).any() else np.nan for row in values_EW])


def _log2(values: Array64) -> Array64:
    """NaN where the value is not positive or unknown."""
    result = np.full(np.shape(values), np.nan)
    np.log2(values, out=result, where=values > 0)
    return result


# --- the policy


class Situation(NamedTuple):
    """Input of a network for one window."""

    inputs_DI: Array32
    """Decisions x inputs, NaN where unknown. D is the number of ranks, or 1 for the whole job."""
    decide: Callable[[Choices], Decision]
    """The decision of some choices, decisions x levers; those of zeros are neutral."""


class PublishedActions:
    """Changes each rank's own last size by one of `DELTAS`."""

    name: ActionSetName = "deltas"
    options: ClassVar[Options] = {}

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:  # noqa: ARG002 - what it needs to know of the past is in the observation
        """Inputs with one row per rank; the carry is one byte per rank, its choice."""
        seen = {name: obs_WF[:, at].astype(np.float64) for name, at in RANK_INDEX.items()}
        seen |= {f"job_{name}": np.full(job.world_size, global_F[at]) for name, at in GLOBAL_INDEX.items()}
        last = decided_sizes(obs_WF)

        def decide(choices_DL: Choices) -> Decision:
            wanted = np.asarray(last) + np.array(DELTAS, dtype=np.int64)[choices_DL[:, 0]]
            sizes = np.clip(wanted, job.min_local_batch_size, job.max_local_batch_sizes)
            return Decision(Allocation(tuple(sizes.tolist())), carry=choices_DL.astype(np.uint8).tobytes())

        return Situation(published_inputs(seen), decide)

    def choices(self, job: Job, carry: bytes) -> Choices:
        """The last choice of each rank; neutral if the carry holds none."""
        if len(carry) != job.world_size:
            return np.zeros((job.world_size, 1), dtype=np.int64)
        return np.frombuffer(carry, dtype=np.uint8).astype(np.int64)[:, None]


class _Kept(msgspec.Struct, array_like=True):
    """The carry of `levers`."""

    choices: tuple[int, ...] = (0, 0, 0)
    exchanges: tuple[tuple[float, float], ...] = ()
    """Period and codec of the window that closed, and of those after it, up to the newest decision."""
    memory: Array64 = msgspec.field(default_factory=EMPTY_MEMORY.copy)


class JobLevers:
    """Moves the global batch, the period of averagings and the codec of the whole job."""

    name: ActionSetName = "levers"
    options: ClassVar[Options] = {"track": track(1)}

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:
        """Inputs with one row."""
        kept = unpack(_Kept, carry)
        memory = kept.memory if len(kept.memory) == len(EMPTY_MEMORY) else EMPTY_MEMORY
        first = job.initial_exchange
        exchanges = kept.exchanges or ((float(first.every), float(first.codec == "int8")),) * LAG
        last, fresh = decided_sizes(obs_WF), np.where(column(obs_WF, "age_windows") == 0, 1.0, np.nan)
        names = ("compute_time_s", "sync_time_s", "step_time_s")
        seen = {name: (column(obs_WF, name) * fresh)[None] for name in names}
        seen["noise_scale"] = global_F[[GLOBAL_INDEX["noise_scale"]]].astype(np.float64)
        running = float(np.nansum(column(obs_WF, "local_batch_size")))
        active, decided = (
            Levers(*(np.array([value]) for value in (batch, *exchange)))
            for batch, exchange in ((running or float(sum(last)), exchanges[0]), (float(sum(last)), exchanges[-1]))
        )
        facts = facts_of([job], np.array([1.0 + window]))
        inputs_DI, memory_EM = lever_inputs(seen, active, decided, facts, memory[None])
        speeds = column(obs_WF, "num_samples") / seen["compute_time_s"][0]
        known = np.isfinite(speeds) & (speeds > 0)
        weights = np.where(known, speeds, speeds[known].mean() if known.any() else 1.0)

        def decide(choices_DL: Choices) -> Decision:
            levers = decided.moved(choices_DL, facts)
            total, every, is_int8 = int(levers.batch[0]), int(levers.every[0]), bool(levers.is_int8[0])
            sizes = last if total == sum(last) else divided(job, total, weights)
            exchange = Exchange(codec="int8" if is_int8 else "none", every=every)
            choices = tuple(int(choice) for choice in choices_DL[0])
            carry = pack(_Kept(choices, (*exchanges[1:], (float(every), float(is_int8))), memory_EM[0]))
            reason = f"{total} samples, {exchange.label}"
            return Decision(allocation_of(self.options, job, sizes, exchange), carry, reason=reason)

        return Situation(inputs_DI, decide)

    def choices(self, job: Job, carry: bytes) -> Choices:  # noqa: ARG002 - one for the whole job
        """One per lever; neutral where the carry holds none."""
        kept = unpack(_Kept, carry).choices
        fits = len(kept) == 3 and all(0 <= at < len(each) for at, each in zip(kept, ACTIONS["levers"], strict=True))
        return np.array([kept if fits else (0, 0, 0)], dtype=np.int64)


def facts_of(jobs: Sequence[Any], num_windows: Array64) -> Columns:
    """Facts of a job or scenario that `lever_inputs` and `Levers.moved` need beside its windows."""

    def of(number: Callable[[Any], float]) -> Array64:
        return np.array([float(number(job)) for job in jobs])

    return {
        "base": of(lambda job: job.base_global_batch_size),
        "smallest": of(lambda job: max(1, job.min_local_batch_size) * job.world_size),
        "largest": of(lambda job: sum(job.max_local_batch_sizes)),
        "world_size_log2": of(lambda job: np.log2(job.world_size)),
        "windows_log2": np.log2(num_windows),
        "permits_rounding": of(lambda job: job.supports_exchange and job.exchange != "exact"),
        "permits_local": of(lambda job: job.supports_exchange and job.exchange == "local"),
        "is_adam": of(lambda job: job.optimizer_family == "adam"),
    }


ActionSet = PublishedActions | JobLevers
"""Between a job's observation and a network that only knows numbered choices. `options` are those of a job that it
understands; `situation` has the arguments of `Policy.decide`."""


def metadata_of(action_set: ActionSetName, **fields: Any) -> PolicyMetadata:
    """Metadata of a policy of this program: its inputs and actions are filled in."""
    return PolicyMetadata(action_set=action_set, inputs=INPUTS[action_set], actions=ACTIONS[action_set], **fields)


def action_set_of(metadata: PolicyMetadata) -> ActionSet:
    """The action set that a network was learned with. Raises PolicyFileError when ours has other inputs or actions."""
    name = metadata.action_set
    for what, theirs, ours in (
        ("inputs", metadata.inputs, INPUTS[name]),
        ("actions", metadata.actions, ACTIONS[name]),
    ):
        if theirs != ours:
            unknown = ", ".join(str(each) for each in theirs if each not in ours) or "fewer, or in another order"
            raise PolicyFileError(
                f"policy {metadata.policy!r}: its {what} are not those of this program ({unknown}): use the "
                "dynamix-batch that wrote it, or learn the policy again"
            )
    return PublishedActions() if name == "deltas" else JobLevers()


OPTIONS: Options = {
    "explore": switch(0, "1: sample actions, for learning; 0: take the likeliest"),
    VERSION_OPTION: VERSION,
}
"""The options of every learned policy; those of its action set come with them."""


class LearnedPolicy:
    """A policy that decides with the network of a file; pure like every policy."""

    def __init__(self, file: PolicyFile, *, name: str = "", version: int = 1) -> None:
        """Prepare the network; `name` replaces the file's. Raises PolicyFileError as `action_set_of`."""
        self.name = name or file.metadata.policy
        self.version = version
        self.digest = bytes.fromhex(file.digest)
        self.action_set = action_set_of(file.metadata)
        self.options: Options = {**OPTIONS, **self.action_set.options}
        self._network = Network(file)

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """The network's choice in this situation."""
        situation = self.action_set.situation(job, window, obs_WF, global_F, carry)
        explores = option(self.options, job, "explore") == 1
        random = keyed_generator(job, window, "explore:") if explores else None
        choices_DL, logprobs_D, values_D = self._network.choose(situation.inputs_DI, random)
        decision = situation.decide(choices_DL)
        if not explores:
            return decision._replace(reason=decision.reason or "the network's likeliest action")
        return decision._replace(
            logprobs=tuple(logprobs_D.tolist()),
            values=tuple(values_D.tolist()),
            reason="drawn from the network's actions, to learn",
        )
