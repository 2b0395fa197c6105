"""Messages of a window before its decision: report, metric window, state; and the traces of agents.

A new measured feature is a field in each of its structs here that it passes, at their ends and with a default.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from .fields import MAX_SOCKETS, Cookie, Count, Message, OptimizerFamily, Seconds, Text, Token

Probe = Literal["ebpf", "tcp_info", "proc", "none"]
Energy = Annotated[float, Meta(ge=0)]
MAX_STRETCH = 1 << 16
Stretch = Annotated[int, Meta(ge=1, le=MAX_STRETCH)]


class SocketCounters(Message, frozen=True, kw_only=True, array_like=True):
    """Cumulative TCP_INFO counters of one rank's own sockets to other ranks, since it attached."""

    tx_bytes: Count
    """Bytes that the other side acknowledged."""
    rx_bytes: Count
    retransmits: Count
    """Retransmitted segments."""
    srtt_us: float | None = None
    """Mean smoothed round trip time of the sockets; `None` without a socket."""


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
    sockets: SocketCounters | None = None
    sockets_before: SocketCounters | None = None
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


class GradientNoise(Message, frozen=True, kw_only=True, array_like=True):
    """The noise estimator of method section 5.2, both moments smoothed over windows separately."""

    trace: float
    """S: trace of the per-sample gradient covariance."""
    squared_norm: float
    """|G_true|^2; not positive while the noise drowns the signal."""


class ParameterDrift(Message, frozen=True, kw_only=True, array_like=True):
    """Drift of ranks in the rounds of local steps that ended in a window: sums of squares over rounds."""

    spread: Annotated[float, Meta(ge=0)]
    """sum_i w_i |d_i - d|^2: d_i is how far rank i moved in a round, w_i its share of samples, d = sum_i w_i d_i."""
    moved: Annotated[float, Meta(gt=0)]
    """|d|^2"""

    @property
    def ratio(self) -> float:
        """`spread` over `moved`."""
        return self.spread / self.moved


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
    drift: ParameterDrift | None = None
    """`None` where no round of local steps ended."""
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
    """Reports of this node that were dropped because the bus was unavailable for too long."""
    simulated: tuple[SystemMetrics, ...] = ()
    """From a virtual cluster only: what a kernel would have measured of each row's process, which does not exist."""
    field: FieldView | None = None
    """Under the policy `stigmergy` what this node's agent sees of the traces around."""
    energy_j: Energy | None = None
    """Joules of all ranks' devices since the window before ended, whatever they did; equal in every node's report;
    `None` where it is not measured."""
    stretch: Stretch = 1
    """Length of the window in units of the job's `window_steps`."""


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
    """`None`, as `sync_time_s`, where the two were not measured separately; `step_time_s` is known."""
    sync_time_s: Seconds | None
    data_time_s: Seconds
    update_time_s: Seconds
    link_bytes_per_s: float | None = None
    """While it sent, to the rank with which it was fastest: neither of the two has a slower link."""
    link_peer: Count | None = None


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
    local_drift: float | None = None
    """Drift of ranks in rounds of local steps over the move of their mean, both squared."""
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
    energy_j: Energy | None = None
    """The report's joules of all ranks' devices."""
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
    """float32, little-endian, ranks x features, row by row; 0 where unknown."""
    known: bytes
    """One bit per value of `features`, most significant first: 0 marks an unknown value."""
    global_features: bytes
    """float32, little-endian; equal in all nodes' messages of one window."""
    global_known: bytes


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
