"""What a run came to: from the messages on the bus to medians per rank. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec
from bench.cluster.plan import Arm, ClusterPlan
from bench.harness.rounds import median_of

from dynamix.collector.procfs.proc import NamespaceTraffic
from dynamix.schemas.features import RANK_INDEX, state_of, unpack_ranks
from dynamix.schemas.messages import Action, Applied, Message, MetricWindow
from dynamix.schemas.messages.allocation import EXACT

SIGNALS = (
    "local_batch_size",
    "step_time_s",
    "compute_time_s",
    "sync_time_s",
    "tx_bytes_per_s",
    "rx_bytes_per_s",
    "retransmits",
    "srtt_us",
    "link_bytes_per_s",
    "cpu_time_ratio",
    "run_queue_wait_ratio",
    "context_switches_per_s",
)
"""Features of the state, as a policy sees them."""


class JobMessages:
    """The messages of one job, as they came over the bus."""

    def __init__(self, world_size: int, num_windows: int) -> None:
        self.windows: dict[int, dict[int, MetricWindow]] = {}
        """By window and rank; a host has one rank."""
        self.applied: list[Applied] = []
        self.actions: list[Action] = []
        self._world_size = world_size
        self._num_windows = num_windows

    @property
    def is_complete(self) -> bool:
        """Whether all windows of all ranks are there."""
        return sum(len(ranks) == self._world_size for ranks in self.windows.values()) >= self._num_windows

    def record_message(self, message: Message) -> None:
        """Keep one message; the job must not restart, since its windows would be counted from 0 again."""
        match message:
            case MetricWindow():
                ranks = self.windows.setdefault(message.window, {})
                ranks.update({rank.rank: message for rank in message.ranks})
            case Applied():
                self.applied.append(message)
            case Action():
                self.actions.append(message)


class WindowSpread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and quartiles of the measured windows."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "WindowSpread":
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    probes: dict[str, int]
    """How many windows got their network metrics from which probe."""
    probe_notes: list[str]
    num_readings_lost: int
    medians: dict[str, float | None]
    """Median of each signal over the measured windows; `None` where it was never known."""
    windows: dict[str, list[float | None]]
    """Each signal in every window, those to warm up too."""
    num_retransmits: int
    """Segments that its sockets retransmitted in all windows."""
    host_retransmits: int
    """RetransSegs of its host over the whole run: of all sockets, those to store and broker too."""
    host_tx_bytes: int
    host_rx_bytes: int


class ClusterResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    label: str
    policy: str
    local_batch_size: int
    step_time_s: WindowSpread
    throughput: WindowSpread
    """Samples per second."""
    final_loss: float | None
    num_windows: int
    """Seen whole; fewer than planned when messages were lost."""
    num_windows_planned: int
    num_actions: int
    num_actions_applied: int
    local_batch_sizes: list[int]
    """Sizes in the last window."""
    ranks: list[RankResult]
    step_times_s: list[float]
    """Step time of every window."""
    exchanges: list[str]
    """How gradients travelled in every window, in words."""
    step_time_s_by_exchange: dict[str, WindowSpread]
    """Over the measured windows, without those in which another one began: their first step may connect ranks."""


def summarise(plan: ClusterPlan, arm: Arm, seen: JobMessages, traffic: Sequence[NamespaceTraffic]) -> ClusterResult:
    """Put a run together; `traffic` is what each host counted meanwhile.

    Raises:
        ValueError: when no window after those to warm up was seen whole.
    """
    whole = {number: ranks for number, ranks in sorted(seen.windows.items()) if len(ranks) == plan.num_hosts}
    measured = [ranks for number, ranks in whole.items() if number >= plan.num_warm_up_windows]
    if not measured:
        raise ValueError(f"{arm.label}: none of the {plan.num_windows} windows came from all {plan.num_hosts} hosts")
    job = [ranks[0].job_metrics for ranks in whole.values()]
    measured_job = [ranks[0].job_metrics for ranks in measured]
    step_times_s = [metrics.step_time_s for metrics in job]
    exchanges = [_exchange(seen.applied, window) for window in whole]
    return ClusterResult(
        label=arm.label,
        policy=arm.policy,
        local_batch_size=arm.local_batch_size,
        step_time_s=WindowSpread.of([metrics.step_time_s for metrics in measured_job]),
        throughput=WindowSpread.of([metrics.throughput for metrics in measured_job if metrics.throughput is not None]),
        final_loss=job[-1].loss,
        num_windows=len(whole),
        num_windows_planned=plan.num_windows,
        num_actions=len(seen.actions),
        num_actions_applied=len({applied.decided_window for applied in seen.applied}),
        local_batch_sizes=[window.ranks[0].training.local_batch_size for _, window in sorted(measured[-1].items())],
        ranks=[
            _rank_result(rank, [ranks[rank] for ranks in whole.values()], len(measured), traffic[rank])
            for rank in range(plan.num_hosts)
        ],
        step_times_s=step_times_s,
        exchanges=exchanges,
        step_time_s_by_exchange=_by_exchange(exchanges, step_times_s, len(whole) - len(measured)),
    )


def _exchange(applied: Sequence[Applied], window: int) -> str:
    """What ruled a window: the newest decision that was adopted by then."""
    adopted = [each for each in applied if each.effective_window <= window]
    return (max(adopted, key=lambda each: each.effective_window).exchange if adopted else EXACT).label


def _by_exchange(exchanges: Sequence[str], step_times_s: Sequence[float], num_warm_up: int) -> dict[str, WindowSpread]:
    found: dict[str, list[float]] = {}
    for number in range(max(num_warm_up, 1), len(exchanges)):
        if exchanges[number] == exchanges[number - 1]:
            found.setdefault(exchanges[number], []).append(step_times_s[number])
    return {exchange: WindowSpread.of(times_s) for exchange, times_s in found.items()}


def missed(result: ClusterResult) -> list[str]:
    """What a run across hosts must show whatever it measures, and did not."""
    found = []
    if result.num_windows < result.num_windows_planned:
        found.append(f"all windows of {result.label}")
    if result.num_actions == 0:
        found.append(f"any action for {result.label}: is there such a policy?")
    return found


def _rank_result(
    rank: int, windows: Sequence[MetricWindow], num_measured: int, traffic: NamespaceTraffic
) -> RankResult:
    signals = _signals(windows)
    networks = [window.ranks[0].network for window in windows]
    return RankResult(
        rank=rank,
        probes=dict(Counter(window.probe for window in windows)),
        probe_notes=sorted({window.probe_note for window in windows} - {""}),
        num_readings_lost=windows[-1].num_readings_lost,
        medians={name: median_of(values[-num_measured:]) for name, values in signals.items()},
        windows=signals,
        num_retransmits=sum(network.retransmits for network in networks if network is not None),
        host_retransmits=traffic.retransmits,
        host_tx_bytes=traffic.tx_bytes,
        host_rx_bytes=traffic.rx_bytes,
    )


def _signals(windows: Sequence[MetricWindow]) -> dict[str, list[float | None]]:
    """The state of a rank in every window, `None` where it is masked."""
    rows = [unpack_ranks(state_of(window))[0] for window in windows]
    signals = {name: [float(row[RANK_INDEX[name]]) for row in rows] for name in SIGNALS}
    return {name: [None if math.isnan(value) else value for value in values] for name, values in signals.items()}
