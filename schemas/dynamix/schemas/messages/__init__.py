"""The messages, each a frozen Struct: `from dynamix.schemas.messages import Report`.

In the order of a window: the job, its measurements, the decision, lessons for recurring jobs, what operators read.
`allocation` has the values that messages are made of. Every message names its job, generation (restart
count) and, where it has one, its window (index from 0 in each generation). A new measured feature is a field in each
struct that it passes. A new field goes at the end and has a default; a changed meaning is a new version of the codec.
`dynamix.schemas.subjects` has the kinds of message with their subjects, senders and receivers.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from .allocation import (
    EXACT,
    MAX_RANKS,
    MAX_SOCKETS,
    Allocation,
    Carry,
    Cookie,
    Count,
    Digest,
    Exchange,
    ExchangePermission,
    Explored,
    GlobalBatch,
    OptionalToken,
    RateFactor,
    Seconds,
    Sizes,
    Split,
    Text,
    Token,
)

OptimizerFamily = Literal["sgd", "adam"]
"""`adam` stands for every optimizer that divides by a running gradient norm (method section IV-D)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Base of all messages: immutable, encoded as arrays in field order.

    `gc=False` spares the garbage collector: an immutable object cannot become part of a reference cycle.
    """


# --- the job


class NodeRanks(Message, frozen=True, kw_only=True, array_like=True):
    """The ranks that run on one node."""

    node: Token
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_RANKS)]


LEAST_GAIN = 1.01
"""`Summary.gain` from which on a session was worth it."""


class Summary(Message, frozen=True, kw_only=True, array_like=True):
    """Gain of a job's decisions over its measured windows, estimated by its measured speeds."""

    num_steps: Count
    num_samples: Count
    time_s: Seconds
    """Time of the steps, without evaluations and other pauses between them."""
    own_s: Seconds
    """Part of it that the training thread of rank 0 spent in DYNAMIX."""
    equal_sizes_s: Seconds | None = None
    """Estimated time of the same samples if all ranks had equal sizes."""
    script_batch_s: Seconds | None = None
    """Estimated time of as many samples at the script's batch; by samples, not by progress. `None`: it was that one."""

    @property
    def gain(self) -> float | None:
        """Estimated time without DYNAMIX over the time taken; above 1 it was worth it."""
        without_s = self.equal_sizes_s if self.script_batch_s is None else self.script_batch_s
        return None if without_s is None or not self.time_s else (without_s - self.own_s) / self.time_s

    @property
    def text(self) -> str:
        """The figures in a sentence or two."""
        took = f"{self.num_steps:,} steps in {float(f'{self.time_s:.3g}'):,g} s"
        for what, seconds in (("at equal sizes", self.equal_sizes_s), ("at the script's batch", self.script_batch_s)):
            took += "" if seconds is None else f", {what} about {float(f'{seconds:.3g}'):,g} s"
        if self.script_batch_s is not None:
            took += " (by samples, not by progress)"
        own = f"our own work took {float(f'{self.own_s:.2g}'):,g} s ({self.own_s / max(self.time_s, 1e-9):.1%})"
        is_worth = self.gain is None or self.gain >= LEAST_GAIN
        return f"{took}; {own}" + ("" if is_worth else "; not worth it here: train this job without DYNAMIX")


class Job(Message, frozen=True, kw_only=True, array_like=True):
    """Specification of one training run; published at each start (generation) and once more at its end."""

    job: Token
    """The user's name plus an 8-character run id, made once per run and kept over restarts."""
    generation: Count
    phase: Literal["running", "ended"]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    nodes: Annotated[tuple[NodeRanks, ...], Meta(min_length=1)]
    window_steps: Annotated[int, Meta(ge=1)]
    """k: optimizer steps between two decisions."""
    initial_local_batch_sizes: Sizes
    """Sizes of the generation's first step: the user's, or the current ones at a restart."""
    base_global_batch_size: Annotated[int, Meta(ge=1)]
    """The global batch size that the user's learning rate was chosen for."""
    min_local_batch_size: Count
    max_local_batch_sizes: Sizes
    """Upper bound per rank: the job's, or less where a rank ran out of memory."""
    optimizer_family: OptimizerFamily
    policy: Token
    seed: Count
    total_samples: Count | None = None
    """Samples in the whole planned run, all epochs; `None` when the end is open."""
    max_lag_windows: Annotated[int, Meta(ge=2)] = 4
    """The trainer refuses an action decided more than this many windows ago."""
    policy_options: dict[str, float | Token] = field(default_factory=dict)
    end_reason: Text = ""
    supports_tracking: bool = False
    """Whether the training processes can divide a global batch among themselves (`Action.split`)."""
    initial_split: Split = "fixed"
    """Whether they do so from the generation's first step on."""
    learning_rate_rule: Literal["none", "linear", "sqrt"] = "sqrt"
    """Power of the global batch size over `base_global_batch_size` that scales the learning rate."""
    global_batch: GlobalBatch = "adaptive"
    """Whether a decision may change the sum of the sizes."""
    exchange: ExchangePermission = "exact"
    """Permission for decisions on the gradient exchange."""
    initial_exchange: Exchange = EXACT
    """The exchange from the generation's first step on, or the one that its ranks began with by themselves."""
    supports_exchange: bool = False
    """Whether the training processes can carry out decisions on the gradient exchange, such as an exact codec."""
    table_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the gradient's numbers that lie in embedding tables, where most rows are zero."""
    family: OptionalToken = ""
    """Name of the family of recurring runs, which start from the profile of earlier ones; empty: none."""
    explores: tuple[Explored, ...] = ()
    """Choices that runs of the family may explore."""
    summary: Summary | None = None
    """Its gain, at its end."""
    exact_exposed_s: Seconds | None = None
    """Time of an exact exchange that computing does not hide, where the first window has another one as well."""
    num_replicas: Count = 0
    """Groups of ranks that exchange gradients, where each sums them within first, as a node does; 0: all ranks do."""

    @property
    def num_exchanging(self) -> int:
        """Number that exchange gradients, and drift apart in local steps."""
        return self.num_replicas or self.world_size

    @property
    def initial_allocation(self) -> Allocation:
        """The allocation of the generation's first step."""
        return Allocation(self.initial_local_batch_sizes, self.initial_split, self.initial_exchange)

    def __post_init__(self) -> None:
        """Raise ValueError when the parts of the specification contradict each other."""
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if ranks != list(range(self.world_size)):
            raise ValueError(f"nodes must hold each rank 0 ... {self.world_size - 1} once, not {ranks[:16]}")
        if len({node.node for node in self.nodes}) != len(self.nodes):
            raise ValueError("two nodes of one job have the same name: set a different DYNAMIX_NODE on each")
        for name in ("initial_local_batch_sizes", "max_local_batch_sizes"):
            if len(getattr(self, name)) != self.world_size:
                raise ValueError(f"{name} must hold {self.world_size} sizes, one per rank")
        if any(size < self.min_local_batch_size for size in self.max_local_batch_sizes):
            raise ValueError(
                f"a maximum below min_local_batch_size={self.min_local_batch_size} leaves no size to choose"
            )


# --- measurements


Probe = Literal["ebpf", "tcp_info", "proc", "none"]
MAX_STRETCH = 1 << 16
Stretch = Annotated[int, Meta(ge=1, le=MAX_STRETCH)]


class NetworkMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """TCP traffic of one rank with other ranks: in a report since it attached, in a metric window over the window."""

    tx_bytes: Count
    """Bytes that the other side acknowledged: what was sent and then dropped by a local queue does not count."""
    rx_bytes: Count
    retransmits: Count
    """Retransmitted segments."""
    srtt_us: float | None = None
    """Mean smoothed round trip time; `None` without a socket, or without an acknowledgement in the window."""


class RankRow(Message, frozen=True, kw_only=True, array_like=True):
    """Measurements of one rank in one window; times are sums over its steps."""

    rank: Count
    local_rank: Count
    pid: Count
    pid_start_ticks: Count
    """Start time of the process in clock ticks since boot: tells a reused pid apart."""
    pid_namespace: Count
    """Inode of the pid namespace in which `pid` counts."""
    uid: Count
    local_batch_size: Count
    """The size in effect in this window; under tracking, in its last step."""
    pending_local_batch_size: Count
    """The newest size already scheduled; equal to `local_batch_size` when none is."""
    num_samples: Count
    loss_sum: float | None
    """Sum over samples, not a mean of means; `None` when the script gives no loss, or it is no longer finite."""
    num_correct: float | None
    data_time_s: Seconds
    """Waiting for the loader."""
    compute_time_s: Seconds
    """Time from receiving the batch until this rank's last gradient bucket is ready."""
    sync_time_s: Seconds
    """Time from then until the reduced gradient is there: waiting for slower ranks, and the all-reduce itself."""
    update_time_s: Seconds
    """Time from then until the end of the step: the optimizer and the user's own code."""
    sockets: NetworkMetrics | None = None
    sockets_before: NetworkMetrics | None = None
    """The counters one window earlier, so that readers need no memory."""
    accuracy_before: float | None = None
    """This rank's mean training accuracy one window earlier."""
    device_memory_bytes: Count | None = None
    device_memory_total_bytes: Count | None = None
    times_split: bool = True
    """Whether compute and sync were measured separately; if not, `compute_time_s` is their sum."""
    cookies: Annotated[tuple[Cookie, ...], Meta(max_length=MAX_SOCKETS)] = ()
    """The kernel's cookies (SO_COOKIE) of the rank's sockets to other ranks, also of closed ones: a probe finds their
    traffic by them."""
    link_bytes_per_s: float | None = None
    """Acknowledged bytes per second of sending, over the connection that was fastest; `None` where none sent much."""
    link_peer: Count | None = None
    """The rank at the other end of that connection."""
    waiting_time_s: Seconds | None = None
    """Part of `sync_time_s` for slower ranks; `None` where ranks do not share their compute times."""


class GradientNoise(Message, frozen=True, kw_only=True, array_like=True):
    """The noise estimator of method section 5.2, both moments smoothed over windows separately."""

    trace: float
    """S: trace of the per-sample gradient covariance."""
    squared_norm: float
    """|G_true|^2; not positive while the noise drowns the signal."""


class JobTotals(Message, frozen=True, kw_only=True, array_like=True):
    """Sums over all ranks of one window: equal in every node's report."""

    window: Count
    num_steps: Count
    num_samples: Count
    global_batch_size: Count
    """Sum of the local batch sizes in effect in the window."""
    loss_sum: float | None
    num_correct: float | None
    time_s: Seconds
    """Longest sum of step times of any rank; evaluation and checkpoints are not in it."""
    noise: GradientNoise | None = None
    learning_rate: float | None = None
    """Learning rate of rank 0's first optimizer, in its first group of parameters, in the window's last step."""
    gradient_norm: float | None = None
    """sqrt(|G_true|^2 + S / B): of the mean gradient over B samples, noise included."""
    coding_gain: float | None = None
    """Codecs with loss: squared norm of what ranks sent, over that of what they should have sent."""


class SystemMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """One rank's process and its children, as measured by the collector; `None` if it could not."""

    cpu_time_ratio: float | None = None
    """CPU seconds per second of the collector's own interval: 2.0 is two busy cores."""
    memory_bytes: Count | None = None
    """Resident memory of the process."""
    memory_ratio: float | None = None
    """Share of the device's memory in use on a GPU, otherwise resident memory over the node's."""
    run_queue_wait_ratio: float | None = None
    """Seconds that its threads were ready and waited for a processor, per second: 2.0 is two threads waiting."""
    context_switches_per_s: float | None = None
    """Voluntary and involuntary switches of all its threads."""


# --- the policy `stigmergy`: every node is a cell, in a ring in the order of the job's nodes. The newest trace on a
# cell's subject is what lies there; it loses the option `evaporation` of its strength in each window.

Activity = Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(min_length=1, max_length=4096)]
"""Samples per second of computing, one number per rank of a node; 0 where there is no trace."""


class SeenTrace(Message, frozen=True, kw_only=True, array_like=True):
    """The part of a trace that its own cell and those beside it can see."""

    strength: Annotated[float, Meta(gt=0, le=1)]
    """The share that has not evaporated: 1 for a new trace."""
    appetite: Annotated[float, Meta(ge=0)]
    waiting_s: Seconds


class FieldView(Message, frozen=True, kw_only=True, array_like=True):
    """Input of a node's agent besides its own ranks' rows: the neighbours' traces, and the policy's options."""

    activity: Activity
    """Activity of its own ranks in its previous trace."""
    own: SeenTrace | None
    """`None` where it has none, or none is left."""
    around: Annotated[tuple[SeenTrace, ...], Meta(max_length=2)] = ()
    """The traces in the cells beside its own."""
    keeps_global_batch: bool = True
    """Whether the sum of the sizes is fixed."""
    rate_exponent: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Power of the global batch that the learning rate follows."""
    options: dict[str, float] = field(default_factory=dict)
    """All options of the policy."""
    base_global_batch_size: Count = 0
    """The global batch that the script's learning rate is meant for."""


class Report(Message, frozen=True, kw_only=True, array_like=True):
    """One window as measured by the ranks of one node."""

    job: Token
    generation: Count
    window: Count
    node: Token
    optimizer_family: OptimizerFamily
    samples_seen: Count
    """Position of the run in samples at the end of the window, over all epochs."""
    rows: Annotated[tuple[RankRow, ...], Meta(min_length=1, max_length=4096)]
    totals: JobTotals
    totals_before: JobTotals | None = None
    total_samples: Count | None = None
    held_out_accuracy: float | None = None
    """The newest evaluation that the user's script reported."""
    num_reports_dropped: Count = 0
    """Reports of this node that were dropped because the bus was unavailable for too long."""
    simulated: tuple[SystemMetrics, ...] = ()
    """From a virtual cluster only: what a kernel would have measured of each row's process, which does not exist."""
    field: FieldView | None = None
    """Under the policy `stigmergy` what this node's agent sees of the traces around."""
    stretch: Stretch = 1
    """Length of the window in units of the job's `window_steps`."""


class TrainingMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """One rank's training in one window; times are means per step."""

    local_batch_size: Count
    pending_local_batch_size: Count
    num_samples: Count
    loss: float | None
    """Mean over samples; `None` when the rank had none."""
    accuracy: float | None
    accuracy_change: float | None
    step_time_s: Seconds
    compute_time_s: Seconds | None
    """`None`, as `sync_time_s`, where the two were not measured separately; `step_time_s` is known."""
    sync_time_s: Seconds | None
    data_time_s: Seconds
    update_time_s: Seconds
    link_bytes_per_s: float | None = None
    """While it sent, to the rank with which it was fastest: neither of the two has a slower link."""
    link_peer: Count | None = None
    waiting_time_s: Seconds | None = None


class RankMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """Everything known of one rank in one window."""

    rank: Count
    training: TrainingMetrics
    system: SystemMetrics
    network: NetworkMetrics | None = None


class NodeMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """The machine and the ranks' network namespace, all jobs together; `None` where not known."""

    load_per_cpu: float | None = None
    memory_used_ratio: float | None = None
    tx_bytes: Count | None = None
    rx_bytes: Count | None = None
    retransmits: Count | None = None
    interval_s: Seconds | None = None
    """The collector's own interval, over which bytes and retransmissions were counted."""
    cpu_time_ratio: float | None = None
    """Busy share of the processors, 0 ... 1."""
    run_queue_wait_ratio: float | None = None
    """Seconds that threads were ready and waited, per second and processor."""
    context_switches_per_s: float | None = None


class GlobalMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """The whole job in one window; the same numbers in every node's message."""

    global_batch_size: Count
    num_samples: Count
    step_time_s: Seconds
    throughput: float | None
    """Samples per second of training time."""
    loss: float | None
    loss_change: float | None
    accuracy: float | None
    accuracy_change: float | None
    held_out_accuracy: float | None
    progress: float | None
    """Share of the planned samples already seen, 0 ... 1; `None` when the end is open."""
    noise_scale: float | None
    """B_noise in samples; `None` while |G_true|^2 is not positive."""
    sigma_norm_sq: float | None
    """S / (B |G_true|^2), masked with `noise_scale`."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    coding_gain: float | None = None


class MetricWindow(Message, frozen=True, kw_only=True, array_like=True):
    """One node's window: the ranks' report, and what the kernel measured of them."""

    job: Token
    generation: Count
    window: Count
    node: Token
    probe: Probe
    """Source of the network metrics; `none` without any."""
    optimizer_family: OptimizerFamily
    num_steps: Count
    ranks: Annotated[tuple[RankMetrics, ...], Meta(min_length=1, max_length=4096)]
    job_metrics: GlobalMetrics
    node_metrics: NodeMetrics
    num_reports_dropped: Count = 0
    refused_pids: tuple[Count, ...] = ()
    """Reported processes that did not match their rank's description and were not read: see the collector's log."""
    probe_note: Text = ""
    """Reason why no better probe than `probe` was used for this window."""
    num_readings_lost: Count = 0
    """Windows without kernel counters since the collector started, because their report or the one before came late.
    Their counters are masked; a generation's first window is not counted."""
    stretch: Stretch = 1
    """The report's."""


class State(Message, frozen=True, kw_only=True, array_like=True):
    """State vectors of one node's ranks, packed: see `dynamix.schemas.features`."""

    job: Token
    generation: Count
    window: Count
    node: Token
    feature_version: Count
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    features: bytes
    """float32, little-endian, ranks x features, row by row; NaN where unknown."""
    global_features: bytes
    """float32, little-endian; equal in all nodes' messages of one window."""


class Trace(Message, frozen=True, kw_only=True, array_like=True):
    """The trace that a node's agent leaves at its cell after a window."""

    job: Token
    generation: Count
    window: Count
    """The newest that it knew."""
    node: Token
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    activity: Activity
    """Activity in the order of `ranks`: all ranks of the job divide the global batch in proportion to it."""
    appetite: Annotated[float, Meta(ge=0)]
    """Samples per step that the job should have, as seen from here; it diffuses. The job has the mean of all cells."""
    waiting_s: Seconds
    """The least time per step that a rank waits at the barrier here, or where such traces come from: that is
    communication; what others wait longer, they wait for slower ranks."""


# --- decisions


MAX_PROFILE_BYTES = 96 * 1024
"""The first action of a job that starts from a profile holds it, beside the carry."""

MAX_MILESTONES = 128
MAX_ARMS = 8


class RankReward(Message, frozen=True, kw_only=True, array_like=True):
    """Reward of one rank and the weighted terms whose sum it is."""

    rank: Count
    reward: float
    terms: dict[str, float]


class Reward(Message, frozen=True, kw_only=True, array_like=True):
    """Rewards of one node's ranks for one window."""

    job: Token
    generation: Count
    window: Count
    node: Token
    formula: Token
    ranks: Annotated[tuple[RankReward, ...], Meta(min_length=1, max_length=4096)]


class Action(Message, frozen=True, kw_only=True, array_like=True):
    """The one decision for one window of a job, and the arbitrator's checkpoint in one."""

    job: Token
    generation: Count
    window: Count
    allocation: Allocation
    """The decision; the sizes are absolute. A new lever is a field of it."""
    deltas: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]
    """Difference to the arbitrator's own previous decision, for information."""
    policy: Token
    policy_version: Count
    watermark: Count
    """FEED sequence up to which the fold needs nothing again: a restart reads on after it."""
    gap: bool = False
    """Inputs between the previous action and this one were no longer in FEED."""
    logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    carry: Carry = b""
    previous_hash: Digest = b""
    hash: Digest = b""
    """SHA-256 over this action without its hash; chains to `previous_hash` (dynamix.schemas.chain)."""
    policy_digest: Digest = b""
    """SHA-256 of the policy's file; empty for policies that do not learn. Fixed within a generation."""
    reason: Text = ""
    """Reason of the decision, in the policy's words and numbers: for people."""
    profile: Annotated[bytes, Meta(max_length=MAX_PROFILE_BYTES)] = b""
    """The stored profile that the generation began with, in its first action: a replay needs no other source."""

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The decided sizes, in rank order."""
        return self.allocation.local_batch_sizes


REFUSALS: dict[str, str] = {
    "job": "it is of another job",
    "generation": "it is of another start of the job",
    "length": "it has sizes for another number of ranks",
    "bounds": "a size is outside the bounds of the job or of a rank's memory",
    "sum": "it changes the global batch, which is fixed",
    "lever": "it asks for what this trainer cannot carry out",
    "stale": "it came too late, see max_lag_windows",
    "not_newer": "a newer one was adopted before",
    "future": "it is of a window that has not ended",
    "tracking": "only its split, which the ranks cannot carry out",
    "malformed": "it cannot be read",
}
"""Why a trainer refuses an action."""


class Applied(Message, frozen=True, kw_only=True, array_like=True):
    """An action that all ranks adopted, and from when on it holds."""

    job: Token
    generation: Count
    decided_window: Count
    effective_window: Count
    effective_step: Count
    local_batch_sizes: Sizes
    action_hash: Digest = b""
    num_refused: dict[str, Count] = field(default_factory=dict)
    """Actions refused so far in this generation, by reason: see `REFUSALS`."""
    exchange: Exchange = EXACT
    """The gradient exchange from `effective_step` on."""


# --- recurring jobs


class ArmRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of the runs with one factor on the learning rate; 1 is the script's own rate."""

    rate_factor: RateFactor
    num_runs: Annotated[int, Meta(ge=1)]
    num_stopped: Count
    """Runs that gave up this factor because they were too far behind."""
    milestones: Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(max_length=MAX_MILESTONES)] = ()
    """Seconds of training until the held-out error fell below each of a row of levels, mean over runs; 0: never."""

    @property
    def label(self) -> str:
        """Description for people."""
        return "nothing changed" if self.rate_factor == 1.0 else f"learning rate x {self.rate_factor:.3g}"


class JobProfile(Message, frozen=True, kw_only=True, array_like=True):
    """Lessons of a job family's runs: the arbitrator writes them at the end of each, and reads them at the next start.

    Times are those of the newest run.
    """

    family: Token
    run: Annotated[int, Meta(ge=1)]
    """Version: how many runs it was made of."""
    job: Token
    """The newest of them."""
    generation: Count
    ended_sequence: Count
    """Sequence in JOBS of the end of that run: an end behind it is not in the profile yet."""
    policy: Token
    """The policy that can read `memory`."""
    policy_version: Count
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    num_windows: Count
    """Decided in the newest run; 0 where the family was forgotten: the ends of its runs until then teach nothing."""
    allocation: Allocation
    """The last decision of the newest run."""
    memory: Annotated[bytes, Meta(max_length=MAX_PROFILE_BYTES)] = b""
    """The policy's model of times and links: rates and fixed times by rank, saturation, communication."""
    arms: Annotated[tuple[ArmRecord, ...], Meta(max_length=MAX_ARMS)] = ()
    """In the order of their first runs."""

    @classmethod
    def forgotten(cls, family: str, ended_sequence: int) -> "JobProfile":
        """The mark of a family that an operator forgot, so that no restart makes it again of runs that are over."""
        return cls(
            family=family,
            run=1,
            job="forgotten",
            generation=0,
            ended_sequence=ended_sequence,
            policy="forgotten",
            policy_version=0,
            world_size=1,
            num_windows=0,
            allocation=Allocation((1,)),
        )

    @property
    def is_forgotten(self) -> bool:
        """Whether the family was forgotten."""
        return self.num_windows == 0


# --- operations


class PolicyVersion(Message, frozen=True, kw_only=True, array_like=True):
    """One version of a learned policy."""

    policy: Token
    version: Count
    digest: Digest
    """SHA-256 of `content`."""
    content: bytes
    """The policy file."""


Signature = Literal[
    "size-stuck", "reward-collapse", "reward-plateau", "spread-between-runs", "value-unexplained", "log-refused"
]
"""Known failures of batch-size control (method section 3), and a log of actions that is not trustworthy."""


class Event(Message, frozen=True, kw_only=True, array_like=True):
    """A failure signature, seen in a job's decisions or in the learning of a policy."""

    job: Token
    """The job, or the policy that learns."""
    generation: Count
    window: Count
    """The window, or the episode of learning, in which it was seen."""
    signature: Signature
    service: Token
    """The service that reports it."""
    value: float
    """The number that crossed the limit."""
    limit: float
    explanation: Text


class Dead(Message, frozen=True, kw_only=True, array_like=True):
    """A message that a service could not use: where it came from, why, and its first 4 KB."""

    service: Token
    subject: Text
    sequence: Count
    reason: Text
    payload: Annotated[bytes, Meta(max_length=4096)]


class Live(Message, frozen=True, kw_only=True, array_like=True):
    """A service's heartbeat: it runs and is connected, and what it has counted."""

    service: Token
    instance: Token
    uptime_s: Seconds
    counters: dict[str, Count] = field(default_factory=dict)
    node: Annotated[str, Meta(max_length=63)] = ""
