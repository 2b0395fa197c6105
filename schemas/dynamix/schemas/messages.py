"""The messages, in the order in which one window travels: report, window, state, reward, action, applied.

Every message names its job, generation (restart count) and, where it has one, its window (index from 0 in each
generation). A new field goes at the end and has a default; a changed meaning is a new version of the codec.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .fields import MAX_RANKS, MAX_SOCKETS, Carry, Cookie, Count, Digest, Seconds, Text, Token
from .policies import Split

OptimizerFamily = Literal["sgd", "adam"]
"""`adam` stands for every optimizer that divides by a running gradient norm (method section IV-D)."""

Probe = Literal["ebpf", "tcp_info", "proc", "none"]
Cookies = Annotated[tuple[Cookie, ...], Meta(max_length=MAX_SOCKETS)]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_RANKS)]
"""Local batch sizes in samples, one per rank, in rank order."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What all messages share: they cannot be changed, and travel as arrays in field order.

    The garbage collector need not look at them: whoever cannot be changed after it was made is in no cycle.
    """


class NodeRanks(Message, frozen=True, kw_only=True, array_like=True):
    """The ranks that run on one node."""

    node: Token
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_RANKS)]


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
    """Sizes of the generation's first step: the user's, or those in force when the job was restarted."""
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
    policy_options: dict[str, float] = {}
    end_reason: Text = ""
    supports_tracking: bool = False
    """Whether the training processes can divide a global batch among themselves (`Action.split`)."""
    initial_split: Split = "fixed"
    """Whether they do so from the generation's first step on."""
    learning_rate_rule: Literal["none", "linear", "sqrt"] = "sqrt"
    """What the learning rate follows of the global batch size over `base_global_batch_size`."""

    def __post_init__(self) -> None:
        """Raise ValueError when the parts of the specification contradict each other."""
        ranks = sorted(rank for node in self.nodes for rank in node.ranks)
        if ranks != list(range(self.world_size)):
            raise ValueError(f"nodes must hold each rank 0 ... {self.world_size - 1} once, not {ranks[:16]}")
        if len({node.node for node in self.nodes}) != len(self.nodes):
            raise ValueError("two nodes of one job have the same name: set DYNAMIX_NODE apart on each")
        for field in ("initial_local_batch_sizes", "max_local_batch_sizes"):
            if len(getattr(self, field)) != self.world_size:
                raise ValueError(f"{field} must hold {self.world_size} sizes, one per rank")
        if any(size < self.min_local_batch_size for size in self.max_local_batch_sizes):
            raise ValueError(
                f"a maximum below min_local_batch_size={self.min_local_batch_size} leaves no size to choose"
            )


class SocketCounters(Message, frozen=True, kw_only=True, array_like=True):
    """Cumulative TCP_INFO counters of one rank's own sockets to other ranks, since it attached."""

    tx_bytes: Count
    """Bytes that the other side acknowledged."""
    rx_bytes: Count
    retransmits: Count
    """Segments sent again."""
    srtt_us: float | None = None
    """Mean smoothed round trip time of the sockets; `None` without a socket."""


class RankRow(Message, frozen=True, kw_only=True, array_like=True):
    """What one rank measured in one window; times are sums over its steps."""

    rank: Count
    local_rank: Count
    pid: Count
    pid_start_ticks: Count
    """Start time of the process in clock ticks since boot: tells a pid from its later namesake."""
    pid_namespace: Count
    """Inode of the pid namespace in which `pid` counts."""
    uid: Count
    local_batch_size: Count
    """The size that ruled this window; under tracking, its last step."""
    pending_local_batch_size: Count
    """The newest size already scheduled; equal to `local_batch_size` when none is."""
    num_samples: Count
    loss_sum: float | None
    """Sum over samples, not a mean of means; `None` when the script gives no loss, or it is no longer finite."""
    num_correct: float | None
    data_time_s: Seconds
    """Waiting for the loader."""
    compute_time_s: Seconds
    """From the batch handed out to this rank's last gradient bucket ready."""
    sync_time_s: Seconds
    """From there to the reduced gradient: waiting for slower ranks, and the all-reduce itself."""
    update_time_s: Seconds
    """From there to the end of the step: the optimizer and the user's own code."""
    sockets: SocketCounters | None = None
    sockets_before: SocketCounters | None = None
    """The counters one window earlier, so that nobody downstream needs a memory."""
    accuracy_before: float | None = None
    """This rank's mean training accuracy one window earlier."""
    device_memory_bytes: Count | None = None
    device_memory_total_bytes: Count | None = None
    times_split: bool = True
    """Whether compute and sync could be told apart; if not, their sum stands in `compute_time_s`."""
    cookies: Cookies = ()
    """The kernel's cookies (SO_COOKIE) of the rank's sockets to other ranks, closed ones too: what a probe finds
    their traffic by."""


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
    """Sum of the local batch sizes that ruled the window."""
    loss_sum: float | None
    num_correct: float | None
    time_s: Seconds
    """Longest sum of step times of any rank; evaluation and checkpoints are not in it."""
    noise: GradientNoise | None = None


class SystemMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """One rank's process and its children, as the collector saw them; `None` where it could not."""

    cpu_time_ratio: float | None = None
    """CPU seconds per second of the collector's own interval: 2.0 is two busy cores."""
    memory_bytes: Count | None = None
    """Resident memory of the process."""
    memory_ratio: float | None = None
    """Share of the device's memory in use on a GPU, otherwise resident memory over the node's."""
    run_queue_wait_ratio: float | None = None
    """Seconds that its threads were ready and waited for a processor, per second: 2.0 is two threads waiting."""
    context_switches_per_s: float | None = None
    """Of all its threads, whether they gave the processor up or it was taken from them."""


class Report(Message, frozen=True, kw_only=True, array_like=True):
    """One window as the ranks of one node measured it."""

    job: Token
    generation: Count
    window: Count
    node: Token
    optimizer_family: OptimizerFamily
    first_step: Count
    epoch: Count
    samples_seen: Count
    """Position of the run in samples at the end of the window, over all epochs."""
    rows: Annotated[tuple[RankRow, ...], Meta(min_length=1, max_length=4096)]
    totals: JobTotals
    totals_before: JobTotals | None = None
    total_samples: Count | None = None
    held_out_accuracy: float | None = None
    """The newest evaluation that the user's script reported."""
    num_reports_dropped: Count = 0
    """Reports of this node that were given up because the bus was away for too long."""
    simulated: tuple[SystemMetrics, ...] = ()
    """From a virtual cluster only: what a kernel would have shown of each row's process, which does not exist."""


class NetworkMetrics(Message, frozen=True, kw_only=True, array_like=True):
    """Traffic of one rank over one window, as the kernel counted it."""

    tx_bytes: Count
    """Acknowledged bytes: what was sent and then dropped by a local queue does not count."""
    rx_bytes: Count
    retransmits: Count
    srtt_us: float | None = None
    """`None` when no acknowledgement was seen in the window."""


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
    """`None`, as `sync_time_s`, where the two could not be told apart; the step is known all the same."""
    sync_time_s: Seconds | None
    data_time_s: Seconds
    update_time_s: Seconds


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


class MetricWindow(Message, frozen=True, kw_only=True, array_like=True):
    """One node's window: what the ranks reported and what the kernel saw of them."""

    job: Token
    generation: Count
    window: Count
    node: Token
    probe: Probe
    """Where the network metrics come from; `none` when there are none."""
    optimizer_family: OptimizerFamily
    num_steps: Count
    ranks: Annotated[tuple[RankMetrics, ...], Meta(min_length=1, max_length=4096)]
    job_metrics: GlobalMetrics
    node_metrics: NodeMetrics
    num_reports_dropped: Count = 0
    refused_pids: tuple[Count, ...] = ()
    """Reported processes that the collector did not believe: see its log for the reason."""
    probe_note: Text = ""
    """Why a better probe than `probe` was passed over for this window."""
    num_readings_lost: Count = 0
    """Windows since the collector started, but for first ones, of which the kernel's counters could not be told: their
    report came late, or that of the window before had. They are masked."""


class State(Message, frozen=True, kw_only=True, array_like=True):
    """State vectors of one node's ranks, packed: see `dynamix.schemas.features`."""

    job: Token
    generation: Count
    window: Count
    node: Token
    feature_version: Count
    ranks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    features: bytes
    """float32, little-endian, ranks x features, row by row; 0 where unknown."""
    known: bytes
    """One bit per value of `features`, most significant first: 0 marks a value that is not known."""
    global_features: bytes
    """float32, little-endian; equal in all nodes' messages of one window."""
    global_known: bytes


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
    local_batch_sizes: Sizes
    """Absolute: what each rank shall use."""
    deltas: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]
    """Difference to the arbitrator's own previous decision, for information."""
    policy: Token
    policy_version: Count
    watermark: Count
    """FEED sequence up to which the fold needs nothing again: a restart reads on after it."""
    split: Split = "fixed"
    """`fixed`: exactly these sizes; `tracking`: their sum, split by the training processes themselves."""
    gap: bool = False
    """Inputs between the previous action and this one were no longer in FEED."""
    logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    carry: Carry = b""
    previous_hash: Digest = b""
    hash: Digest = b""
    """SHA-256 over this action without its hash; chains to `previous_hash` (dynamix.schemas.chain)."""
    levers: dict[str, float] = {}
    """Decisions beyond the sizes, by name; a trainer refuses an action with a lever that it does not know."""
    policy_digest: Digest = b""
    """SHA-256 of the policy's file; empty for policies that do not learn. Fixed within a generation."""


class Applied(Message, frozen=True, kw_only=True, array_like=True):
    """An action that all ranks adopted, and when it starts to rule."""

    job: Token
    generation: Count
    decided_window: Count
    effective_window: Count
    effective_step: Count
    local_batch_sizes: Sizes
    action_hash: Digest = b""
    num_refused: dict[str, Count] = {}
    """Actions refused so far in this generation, by reason."""


class PolicyVersion(Message, frozen=True, kw_only=True, array_like=True):
    """A learner's announcement: this version of a policy can be had."""

    policy: Token
    version: Count
    feature_version: Count
    digest: Digest
    location: Text = ""


Signature = Literal[
    "size-stuck", "reward-collapse", "reward-plateau", "spread-between-runs", "value-unexplained", "log-refused"
]
"""Ways in which batch-size control is known to fail (method section 3); a log of actions that cannot be believed."""


class Event(Message, frozen=True, kw_only=True, array_like=True):
    """A failure signature, seen in a job's decisions or in the learning of a policy."""

    job: Token
    """The job, or the policy that learns."""
    generation: Count
    window: Count
    """The window, or the episode of learning, in which it was seen."""
    signature: Signature
    service: Token
    """Who saw it."""
    value: float
    """The number that crossed the limit."""
    limit: float
    explanation: Text


class Dead(Message, frozen=True, kw_only=True, array_like=True):
    """A message that somebody could not use: where it came from, why, and its first 4 KB."""

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
    counters: dict[str, Count] = {}
    node: Annotated[str, Meta(max_length=63)] = ""
