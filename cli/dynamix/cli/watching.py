"""What rows of a watched job show: which rank, link or loader is slow, and what each remedy would save. Pure.

A rank's own time is what it needs until it waits for others: data, between, compute and update. Communication is the
least `sync_s` of all ranks in a step, for the last one to arrive waits for nobody; what a rank waits more, it waits for
slower ranks. Predictions replay the measured steps with other compute times and other communication; the sizes, the way
of exchange and its time are those that the policies' own models give (`arbitrator.policies`).
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from dynamix.arbitrator.policies.exchange import DWELL, LINK_WINDOWS, ExchangeMemory, choose, link_rates
from dynamix.arbitrator.policies.step_time import SPLIT_DEAD_BAND, StepTime
from dynamix.schemas.features import RANK_INDEX
from dynamix.schemas.messages import Job, NodeRanks
from dynamix.schemas.messages.allocation import EXACT, Exchange, ExchangePermission
from dynamix.schemas.watching import Row, Step

WINDOW_STEPS, WINDOW_S = 10, 1.0
"""A window has at least so many steps and lasts at least so long."""
WARM_UP_STEPS = 3
"""Not counted: memory is allocated, and DDP rebuilds its buckets."""
KEPT_STEPS = 2000
"""The newest steps, which the report is about."""
PAUSE = 5.0
"""A step longer than so many usual ones is a pause, such as an evaluation, and not part of the means."""
NOTABLE = 0.05
"""Share of a step by which a rank must be late to be named; of communication and data twice that."""
CERTAIN = 3.0
"""Standard errors by which it must be."""
SLOW_LINK = 0.6
"""A link is slow that carries less than this share of the others' median."""
FIXED_SHARE = 0.1
"""Share of the fastest rank's compute time that may not depend on the batch; steps of one size do not show it."""
PRIOR_ERROR = 0.3
"""Relative error of the time of an exchange that was not measured."""

Array = npt.NDArray[np.float64]
Kind = Literal["rank", "loader", "loaders", "link", "network"]
CAUSES = {"data_s": "waits for data", "between_s": "spends between steps", "compute_s": "computes"}
CAUSES["update_s"] = "updates"
FIELDS = ("data_s", "between_s", "compute_s", "sync_s", "update_s")
DATA, COMPUTE, SYNC = (FIELDS.index(name) for name in ("data_s", "compute_s", "sync_s"))


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that makes steps longer."""

    kind: Kind
    rank: int | None
    cause: str
    """For a rank the field of `Step` in which it is late."""
    excess_s: float
    """Seconds per step; of a rank what it is later than the others."""
    error_s: float
    text: str


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """What a change would save."""

    name: str
    how: str
    saving: float
    """Share of the time per sample."""
    error: float
    is_worthwhile: bool


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Means of one rank per step."""

    rank: int
    node: str
    compute_s: float
    wait_s: float
    data_s: float
    between_s: float
    update_s: float
    memory_bytes: int
    cpu_s: float
    queued_s: float
    num_throttled: int
    link_bytes_per_s: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of a watched job."""

    num_steps: int
    num_windows: int
    step_s: float
    communication_s: float
    pauses_s: float
    num_pauses: int
    local_batch_size: float
    gradient_bytes: int
    ranks: list[RankTimes]
    findings: list[Finding]
    windows_named: dict[str, int]
    """Number of windows in which each was found, by `KIND RANK CAUSE`."""
    first_named: dict[str, int]
    """The first of them, from 1."""
    remedies: list[Remedy]
    notes: list[str]


def name_of(finding: Finding) -> str:
    """What tells a finding from others."""
    rank = () if finding.rank is None else (str(finding.rank),)
    return " ".join((finding.kind, *rank, *([finding.cause] if finding.kind == "rank" else [])))


class Watched:
    """Rows in, a report out."""

    def __init__(self) -> None:
        self._begin(-1)

    def _begin(self, restart: int) -> None:
        self._restart = restart
        self._rows: dict[int, Row] = {}
        self._sums: dict[int, Array] = {}
        """Of wall clock, processor time, time without a processor, throttled periods."""
        self._rates: dict[int, tuple[float, int]] = {}
        self._waiting: dict[int, dict[int, Step]] = {}
        self._steps: deque[Array] = deque(maxlen=KEPT_STEPS)
        self.num_steps, self.num_windows, self._of_window, self._window_s = 0, 0, 0, 0.0
        self.found: list[Finding] = []
        """In the newest window."""
        self.windows_named: dict[str, int] = {}
        self.first_named: dict[str, int] = {}

    def add(self, row: Row) -> bool:
        """Take in one row; whether a window ended."""
        if row.restart > self._restart:  # torchrun has restarted the ranks
            self._begin(row.restart)
        elif row.restart < self._restart:
            return False
        self._rows[row.rank] = row
        counted = np.array([row.wall_s, row.cpu_s, row.queued_s, row.num_throttled, len(row.steps)])
        self._sums[row.rank] = self._sums.get(row.rank, np.zeros(len(counted))) + counted
        if row.link_bytes_per_s is not None and row.link_peer is not None:
            self._rates[row.rank] = row.link_bytes_per_s, row.link_peer
        has_ended = False
        for number, step in enumerate(row.steps, row.first_step):
            known = self._waiting.setdefault(number, {})
            known[row.rank] = step
            if len(known) == row.world_size:
                del self._waiting[number]
                has_ended |= self._take(number, known)
        while len(self._waiting) > 10 * KEPT_STEPS:  # rows were lost: these steps are never complete
            del self._waiting[min(self._waiting)]
        return has_ended

    def _take(self, number: int, known: dict[int, Step]) -> bool:
        """A step of all ranks; whether it ends a window."""
        self.num_steps = number + 1
        if number < WARM_UP_STEPS:
            return False
        times = np.array([msgspec.structs.astuple(known[rank]) for rank in sorted(known)])
        self._steps.append(times)
        self._of_window += 1
        self._window_s += float(times[:, :-1].sum(axis=1).max())
        if self._of_window < WINDOW_STEPS or self._window_s < WINDOW_S:
            return False
        self.num_windows += 1
        self.found = self.findings(np.array(list(self._steps)[-self._of_window :]))
        self._of_window, self._window_s = 0, 0.0
        for name in map(name_of, self.found):
            self.windows_named[name] = self.windows_named.get(name, 0) + 1
            self.first_named.setdefault(name, self.num_windows)
        return True

    def per_step(self, rank: int) -> Array:
        """Wall clock, processor time, time without a processor and throttled periods of a rank, per step."""
        sums = self._sums[rank]
        per_step: Array = sums[:-1] / max(sums[-1], 1.0)
        return per_step

    @property
    def rates(self) -> Array | None:
        """Bytes per second of each rank's link, where all are known."""
        obs_WF = np.full((len(self._rows), len(RANK_INDEX)), np.nan, dtype=np.float32)
        for rank, (rate, peer) in self._rates.items():
            obs_WF[rank, RANK_INDEX["link_bytes_per_s"]], obs_WF[rank, RANK_INDEX["link_peer"]] = rate, peer
        return link_rates(obs_WF)

    def findings(self, steps_TWF: Array) -> list[Finding]:
        """What is slow in some steps, the worst first."""
        times = usual(steps_TWF)[:, :, :-1]
        own_TW, comm_T = own_and_communication(times)
        step_s = float((own_TW.max(axis=1) + comm_T).mean())
        middle = (own_TW.shape[1] - 1) // 2
        typical_T = own_TW[:, np.argsort(own_TW.mean(axis=0))[middle]]
        found = []
        for rank in range(own_TW.shape[1]):
            excess_s, error_s = mean_and_error(own_TW[:, rank] - typical_T)
            if excess_s > max(NOTABLE * step_s, CERTAIN * error_s):
                found.append(self._late(rank, times, excess_s, error_s))
        found.sort(key=lambda each: -each.excess_s)
        data_s, error_s = mean_and_error(np.sort(times[:, :, DATA], axis=1)[:, middle])
        if data_s > 2 * NOTABLE * step_s:
            text = f"All loaders are slow: a rank waits {ms(data_s)} of {ms(step_s)} per step for data"
            found.append(
                Finding(kind="loaders", rank=None, cause="data_s", excess_s=data_s, error_s=error_s, text=text)
            )
        comm_s, error_s = mean_and_error(comm_T)
        if comm_s > 2 * NOTABLE * step_s:
            found.append(self._communication(comm_s, error_s, step_s))
        return found

    def _late(self, rank: int, times: Array, excess_s: float, error_s: float) -> Finding:
        mean_WF = times.mean(axis=0)
        more_F = mean_WF[rank] - np.sort(mean_WF, axis=0)[(len(mean_WF) - 1) // 2]
        more_F[SYNC] = -math.inf
        cause = int(more_F.argmax())
        field, usual_s = FIELDS[cause], float(mean_WF[rank, cause] - more_F[cause])
        text = (
            f"Rank {rank} {'has a slow loader' if field == 'data_s' else 'is slow'}: it {CAUSES[field]} "
            f"{1e3 * float(more_F[cause]):.1f} +- {2e3 * error_s:.1f} ms longer per step than the others "
            f"({ms(float(mean_WF[rank, cause]))}, they {ms(usual_s)})"
        )
        if field != "data_s" and self._rows[rank].device == "cpu":
            text += self._why(rank, float(more_F[cause]))
        kind: Kind = "loader" if field == "data_s" else "rank"
        return Finding(kind=kind, rank=rank, cause=field, excess_s=excess_s, error_s=error_s, text=text)

    def _why(self, rank: int, excess_s: float) -> str:
        """What a rank's threads did in the time that it took longer than others."""
        all_WC = np.array([self.per_step(each) for each in sorted(self._rows)])
        _, cpu_s, queued_s, throttled = all_WC[rank] - np.sort(all_WC, axis=0)[(len(all_WC) - 1) // 2]
        if queued_s > 0.4 * excess_s:
            quota = "its cgroup's quota was used up" if throttled > 0.1 else "other processes used them"
            return f"; it waited for a processor {ms(queued_s)} longer: {quota}"
        if cpu_s > 0.4 * excess_s:
            return f"; its processor was busy {ms(cpu_s)} longer: it is slower, or has more to do"
        return "; it neither used a processor nor waited for one meanwhile: it slept or was blocked"

    def _communication(self, comm_s: float, error_s: float, step_s: float) -> Finding:
        text = f"Communication that computing does not hide takes {ms(comm_s)} of {ms(step_s)} per step"
        rates, kind, rank = self.rates, "network", None
        if rates is not None and len(rates) > 1:
            slowest = int(rates.argmin())
            others = float(np.median(np.delete(rates, slowest)))
            if rates[slowest] < SLOW_LINK * others:
                kind, rank = "link", slowest
                text += (
                    f": the link of rank {slowest} ({self._rows[slowest].node}) is slow, it carries "
                    f"{8e-6 * rates[slowest]:.3g} Mbit/s, the others {8e-6 * others:.3g}"
                )
            else:
                text += f": links carry {8e-6 * rates.min():.3g} to {8e-6 * rates.max():.3g} Mbit/s"
        return Finding(kind=kind, rank=rank, cause="sync_s", excess_s=comm_s, error_s=error_s, text=text)  # type: ignore[arg-type]

    def report(self) -> Report | None:
        """What is known so far; `None` before any step of all ranks was seen."""
        if not self._steps:
            return None
        all_TWF = np.array(self._steps)
        steps_TWF = usual(all_TWF)
        own_TW, comm_T = own_and_communication(steps_TWF[:, :, :-1])
        mean_WF = steps_TWF.mean(axis=0)
        ranks = []
        for rank, row in sorted(self._rows.items()):
            _, cpu_s, queued_s, _ = map(float, self.per_step(rank))
            ranks.append(
                RankTimes(
                    rank=rank,
                    node=row.node,
                    wait_s=float(mean_WF[rank, SYNC] - comm_T.mean()),
                    memory_bytes=row.memory_bytes,
                    cpu_s=cpu_s,
                    queued_s=queued_s,
                    num_throttled=int(self._sums[rank][3]),
                    link_bytes_per_s=self._rates.get(rank, (None,))[0],
                    **{name: float(mean_WF[rank, at]) for at, name in enumerate(FIELDS) if at != SYNC},
                )
            )
        lengths = all_TWF[:, :, :-1].sum(axis=2).max(axis=1)
        num_pauses = len(all_TWF) - len(steps_TWF)
        sizes = mean_WF[:, -1]
        return Report(
            num_steps=self.num_steps,
            num_windows=self.num_windows,
            step_s=float((own_TW.max(axis=1) + comm_T).mean()),
            communication_s=float(comm_T.mean()),
            pauses_s=float(np.sort(lengths)[len(lengths) - num_pauses :].sum()),
            num_pauses=num_pauses,
            local_batch_size=float(sizes.mean()),
            gradient_bytes=self._rows[0].gradient_bytes,
            ranks=ranks,
            findings=self.findings(all_TWF),
            windows_named=self.windows_named,
            first_named=self.first_named,
            remedies=self.remedies(steps_TWF),
            notes=list(dict.fromkeys(note for _, row in sorted(self._rows.items()) for note in row.notes)),
        )

    # --- predictions

    def remedies(self, steps_TWF: Array) -> list[Remedy]:
        """What each remedy would save, the best first; those not worthwhile last."""
        times, sizes_W = steps_TWF[:, :, :-1], steps_TWF[:, :, -1].mean(axis=0)
        if steps_TWF.shape[1] < 2:
            return []
        own_TW, comm_T = own_and_communication(times)
        compute_TW, data_TW = times[:, :, COMPUTE], times[:, :, DATA]
        now_T = own_TW.max(axis=1) + comm_T

        def saved(own: Array, comm: Array, *, samples: float = 1.0) -> tuple[float, float]:
            """Share of the time per sample that is saved, with twice its standard error, of pairs of steps."""
            after_T = (own.max(axis=1) + comm) / samples
            kept = float(after_T.mean()) / float(now_T.mean())
            return 1.0 - kept, 2.0 * mean_and_error((after_T - kept * now_T) / float(now_T.mean()))[1]

        found = []
        data_saving, data_error = saved(own_TW - data_TW, comm_T)
        found.append(
            Remedy(
                name="loaders that keep up",
                how="more num_workers, or less work per sample",
                saving=data_saving,
                error=data_error,
                is_worthwhile=data_saving > max(2 * NOTABLE, data_error),
            )
        )
        if sizes_W.min() >= 1.0:
            found += self._with_sizes(sizes_W, own_TW, compute_TW, comm_T, saved)
        return sorted(found, key=lambda each: (not each.is_worthwhile, -each.saving))

    def _with_sizes(
        self,
        sizes_W: Array,
        own_TW: Array,
        compute_TW: Array,
        comm_T: Array,
        saved: Callable[..., tuple[float, float]],
    ) -> list[Remedy]:
        """Remedies for which the samples of a step must be known: by the policies' models, from their `Job`."""
        comm_s, compute_W, found = float(comm_T.mean()), compute_TW.mean(axis=0), []
        rest_s = float(np.median((own_TW - compute_TW).mean(axis=0)))
        job = self._job(sizes_W)
        sizes, total = job.initial_local_batch_sizes, sum(job.initial_local_batch_sizes)

        def model_with(fixed_share: float) -> StepTime:
            fixed_s = fixed_share * float(compute_W.min())
            return StepTime(
                seconds_per_sample_W=np.maximum((compute_W - fixed_s) / np.asarray(sizes), 1e-9),
                lower_W=np.ones(len(sizes)),
                upper_W=np.asarray(job.max_local_batch_sizes, dtype=np.float64),
                overhead_W=np.full(len(sizes), fixed_s),
                saturation_W=np.zeros(len(sizes)),
                sync_intercept_s=comm_s,
                rest_s=rest_s,
            )

        def scaled(model: StepTime, new: tuple[int, ...]) -> Array:
            """Own times with other sizes."""
            new_W, now_W = (model.compute_s(np.array(each, dtype=np.float64)) for each in (new, sizes))
            return own_TW + compute_TW * (new_W / now_W - 1.0)

        model, doubted = model_with(0.0), model_with(FIXED_SHARE)
        divided = model.divide(total)
        split_TW = scaled(model, divided)
        saving, error = saved(split_TW, comm_T)
        doubt = abs(saving - saved(scaled(doubted, divided), comm_T)[0])
        found.append(
            Remedy(
                name=f"divide the batch by speed: {'/'.join(map(str, divided[:8]))}",
                how="attach(model, optimizer, loader)",
                saving=saving,
                error=math.hypot(error, doubt),
                is_worthwhile=saving > max(SPLIT_DEAD_BAND, error),
            )
        )
        twice = tuple(2 * size for size in sizes)
        saving, error = saved(scaled(model, twice), comm_T, samples=2.0)
        doubt = abs(saving - saved(scaled(doubted, twice), comm_T, samples=2.0)[0])
        found.append(
            Remedy(
                name="twice the batch, per sample",
                how='attach(..., global_batch="adaptive"), which measures what larger batches are worth',
                saving=saving,
                error=math.hypot(error, doubt),
                is_worthwhile=saving > max(2 * NOTABLE, error),
            )
        )
        rates = self.rates
        memory = ExchangeMemory(
            active=(EXACT, EXACT),
            times_s={EXACT.codec: comm_s},
            age=DWELL,
            rates=np.zeros(0) if rates is None else rates,
            num_link_windows=0 if rates is None else LINK_WINDOWS,
        )
        permissions: dict[ExchangePermission, tuple[str, Exchange]] = {
            "exact": ("exact sums at owners with shares", Exchange(route="shares")),
            "lossy": ("gradients rounded to int8", Exchange(codec="int8")),
            "local": ("4 local steps between averagings, int8", Exchange(codec="int8", every=4)),
        }
        for permission, (name, way) in permissions.items():
            if permission == "exact" and rates is None:
                continue
            permitted = msgspec.structs.replace(job, exchange=permission)
            chosen = choose(permitted, model, memory, total, max_every=16)
            factor = memory.time_s(way, 0.0) / max(comm_s, 1e-9) / way.every
            is_worthwhile = chosen.every == way.every and chosen != EXACT
            how = f'attach(..., exchange="{permission}")'
            saving, error = saved(own_TW, factor * comm_T)
            doubt = PRIOR_ERROR * factor * comm_s / max(float((own_TW.max(axis=1) + comm_T).mean()), 1e-9)
            found.append(
                Remedy(name=name, how=how, saving=saving, error=math.hypot(error, doubt), is_worthwhile=is_worthwhile)
            )
        return found

    def _job(self, sizes_W: Array) -> Job:
        """The job as the policies would see it, attached with the script's sizes."""
        sizes = tuple(max(round(size), 1) for size in sizes_W.tolist())
        nodes: dict[str, list[int]] = {}
        for rank, row in sorted(self._rows.items()):
            nodes.setdefault(row.node, []).append(rank)
        return Job(
            job="watch",
            generation=0,
            phase="running",
            world_size=len(sizes),
            nodes=tuple(NodeRanks(node=node, ranks=tuple(ranks)) for node, ranks in nodes.items()),
            window_steps=WINDOW_STEPS,
            initial_local_batch_sizes=sizes,
            base_global_batch_size=sum(sizes),
            min_local_batch_size=1,
            max_local_batch_sizes=(2 * max(sizes),) * len(sizes),
            optimizer_family="adam" if "adam" in self._rows[0].optimizer.lower() else "sgd",
            policy="split",
            seed=0,
            supports_tracking=True,
            supports_exchange=True,
        )


def usual(steps_TWF: Array) -> Array:
    """The steps without pauses."""
    lengths_T = steps_TWF[:, :, :-1].sum(axis=2).max(axis=1)
    kept: Array = steps_TWF[lengths_T <= PAUSE * np.median(lengths_T)]
    return kept


def own_and_communication(times_TWF: Array) -> tuple[Array, Array]:
    """Time of each rank that is not waiting, and of each step's communication."""
    sync_TW: Array = times_TWF[:, :, SYNC]
    return times_TWF.sum(axis=2) - sync_TW, sync_TW.min(axis=1)


def mean_and_error(values_T: Array) -> tuple[float, float]:
    """Mean and its standard error, by the means of ten blocks: neighbouring steps are alike."""
    blocks = np.array([block.mean() for block in np.array_split(values_T, min(10, len(values_T)))])
    error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
    return float(values_T.mean()), error


def ms(seconds: float) -> str:
    """Milliseconds in words."""
    return f"{1e3 * seconds:.3g} ms"


# --- as text


def line(watched: Watched) -> str:
    """The newest window in one line."""
    found = "; ".join(each.text for each in watched.found) or "no rank, link or loader is slow"
    return f"dynamix watch: step {watched.num_steps}, window {watched.num_windows}: {found}"


def page(report: Report) -> str:
    """The whole report."""
    summary = (
        f"dynamix watch: {report.num_steps} steps on {len(report.ranks)} ranks, {ms(report.step_s)} each, of which "
        f"{ms(report.communication_s)} communication ({report.gradient_bytes / 1e6:.3g} MB of gradients), "
        f"{report.local_batch_size:.4g} samples per rank"
    )
    lines = [
        summary,
        "",
        "  rank   compute      wait      data   between    update    memory   node      (ms per step, MB)",
    ]
    for each in report.ranks[:64]:
        times = (each.compute_s, each.wait_s, each.data_s, each.between_s, each.update_s)
        numbers = "".join(f"{1e3 * time:10.1f}" for time in times)
        lines.append(f"  {each.rank:4}{numbers}{each.memory_bytes / 1e6:10.0f}   {each.node}")
    lines.append("")
    for found in report.findings:
        named = report.windows_named.get(name_of(found), 0)
        lines.append(f"{found.text}; in {named} of {report.num_windows} windows.")
    if not report.findings:
        lines.append("No rank, link or loader is slow.")
    if report.num_pauses:
        pauses = f"{report.num_pauses} steps took more than {PAUSE:g} usual ones, {report.pauses_s:.3g} s in all"
        lines.append(f"{pauses} (evaluation, checkpoints, stalls); they are not counted above.")
    lines += [f"Note: {note}." for note in report.notes]
    worthwhile = [each for each in report.remedies if each.is_worthwhile]
    lines += ["", "Estimated time per sample with DYNAMIX, by the models of its policies:"] if worthwhile else []
    lines += [f"  {-100 * one.saving:+4.0f} % +- {100 * one.error:.0f}   {one.name:44} {one.how}" for one in worthwhile]
    if others := [each for each in report.remedies if not each.is_worthwhile]:
        words = ", ".join(f"{one.name.partition(':')[0]} ({-100 * one.saving:+.0f} %)" for one in others)
        lines += ["", f"Not worth it here: {words}."]
    if any("local" in each.name for each in worthwhile):
        lines.append(
            "Local steps and larger batches need more samples to the same accuracy: how many is not known here."
        )
    return "\n".join(lines)
