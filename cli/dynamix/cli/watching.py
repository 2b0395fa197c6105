"""Evaluates rows of a watched job: which rank, link or loader is slow, and what each remedy would save. Pure.

A rank's own time is what it needs until it waits for others: data, between, compute and update. Communication is what
a step takes beyond the longest own time, for the last rank to arrive does not wait; what a rank waits more, it waits
for slower ranks. Predictions replay the measured steps with other compute times and other communication. The sizes and
times of an exchange are those of the policies' own models (`arbitrator.policies`).
"""

import math
from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from dynamix.arbitrator.policies.exchange import BEGIN, PRIORS
from dynamix.arbitrator.policies.step_time import SPLIT_DEAD_BAND, StepTime
from dynamix.cli.output import Document
from dynamix.schemas.watching import COMPUTE, DATA, SYNC, Row, Step

WINDOW_STEPS, WINDOW_S = 10, 1.0
"""A window has at least so many steps and lasts at least so long."""
WARM_UP_STEPS = 3
"""Not counted: memory is allocated, and DDP rebuilds its buckets."""
KEPT_STEPS = 2000
"""The newest steps, which the report is about."""
PAUSE = 5.0
"""A step longer than so many usual ones is a pause, such as an evaluation, and not part of the means."""
NOTABLE, CERTAIN = 0.05, 3.0
"""Share of a step, and standard errors, by which a rank must be late to be named; of data and communication twice the
share."""
SLOW_LINK = 0.6
"""A link is slow that carries less than this share of the others' median."""
EXPLAINS = 0.75
"""Share of the communication that a ring at a slow link's rate must take: else a rank sends slowly, not its link."""
FIXED_SHARE = 0.1
"""Share of the fastest rank's compute time that may not depend on the batch: steps of one size do not show it."""
LOCAL_STEPS = 4
"""Period whose gain is estimated."""
PRIOR_ERROR = 0.3
"""Relative error of the time of an exchange that was not measured."""

FIELDS = Step.__struct_fields__[:-1]
DOES = ("waits for data", "spends between steps", "computes", "", "updates")

Array = npt.NDArray[np.float64]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that makes steps longer."""

    name: str
    """`rank 2 compute_s`, `loader 2`, `all loaders`, `link 2` or `network`."""
    excess_s: float
    """Seconds per step; of a rank what it is later than the others."""
    text: str


class Remedy(msgspec.Struct, frozen=True):
    """Estimated saving of a change: a share of the time per sample, with its error."""

    name: str
    how: str
    saving: float
    error: float
    is_worthwhile: bool


class Watched:
    """Rows in, a report out."""

    def __init__(self, restart: int = -1) -> None:
        self._restart = restart
        self._rows: dict[int, Row] = {}
        self._links: dict[int, tuple[float, int]] = {}
        self._incomplete: dict[int, dict[int, Step]] = {}
        self._steps: deque[Array] = deque(maxlen=KEPT_STEPS)
        self.num_steps, self.num_windows, self._num_new, self._new_s = 0, 0, 0, 0.0
        self.found: list[Finding] = []
        """In the newest window."""
        self.windows_named: dict[str, list[int]] = {}
        """Windows in which each was found, from 1."""

    def add(self, row: Row) -> bool:
        """Take in one row; whether a window ended."""
        if row.restart > self._restart or (row.first_step == 0 and row.rank in self._rows):  # torchrun has restarted
            Watched.__init__(self, row.restart)
        self._rows[row.rank] = row
        if row.link_bytes_per_s is not None and row.link_peer is not None:
            self._links[row.rank] = row.link_bytes_per_s, row.link_peer
        has_ended = False
        for number, step in enumerate(row.steps, row.first_step):
            known = self._incomplete.setdefault(number, {})
            known[row.rank] = step
            if len(known) == row.world_size:
                del self._incomplete[number]
                self.num_steps = number + 1
                if number >= WARM_UP_STEPS:
                    has_ended |= self._take(np.array([msgspec.structs.astuple(known[each]) for each in sorted(known)]))
        while len(self._incomplete) > 10 * KEPT_STEPS:  # rows were lost: these steps are never complete
            del self._incomplete[min(self._incomplete)]
        return has_ended

    def _take(self, step_WF: Array) -> bool:
        self._steps.append(step_WF)
        self._num_new += 1
        self._new_s += float(step_WF[:, :-1].sum(axis=1).max())
        if self._num_new < WINDOW_STEPS or self._new_s < WINDOW_S:
            return False
        self.num_windows += 1
        self.found = self._findings(np.array(list(self._steps)[-self._num_new :]))
        self._num_new, self._new_s = 0, 0.0
        for each in self.found:
            self.windows_named.setdefault(each.name, []).append(self.num_windows)
        return True

    def report(self) -> Document | None:
        """Everything that is known; `None` before a step of all ranks was seen."""
        if not self._steps:
            return None
        all_TWF = np.array(self._steps)
        steps_TWF = usual(all_TWF)
        own_TW, comm_T = own_and_communication(steps_TWF)
        mean_WF, comm_s = steps_TWF.mean(axis=0), float(comm_T.mean())
        ranks, named = [], self.windows_named
        for rank, row in sorted(self._rows.items()):
            times = dict(zip(FIELDS, mean_WF[rank].tolist(), strict=False))
            wait_s, more = max(times.pop("sync_s") - comm_s, 0.0), {"node": row.node, "memory_bytes": row.memory_bytes}
            ranks.append({"rank": rank, **times, "wait_s": wait_s, **more})
        return {
            "num_steps": self.num_steps,
            "num_windows": self.num_windows,
            "step_s": float((own_TW.max(axis=1) + comm_T).mean()),
            "communication_s": comm_s,
            "num_pauses": len(all_TWF) - len(steps_TWF),
            "local_batch_size": float(mean_WF[:, -1].mean()),
            "gradient_bytes": self._rows[0].gradient_bytes,
            "ranks": ranks,
            "findings": [each for each in self._findings(all_TWF) if each.name in named or not self.num_windows],
            "windows_named": named,
            "remedies": self._remedies(steps_TWF),
            "notes": self._rows[0].notes,
        }

    # --- what is slow

    def _findings(self, steps_TWF: Array) -> list[Finding]:
        """Find what is slow in some steps: ranks and their loaders, the worst first, all loaders, communication."""
        times = usual(steps_TWF)[:, :, :-1]
        own_TW, comm_T = own_and_communication(times)
        step_s, middle = float((own_TW.max(axis=1) + comm_T).mean()), (own_TW.shape[1] - 1) // 2
        typical_T = own_TW[:, np.argsort(own_TW.mean(axis=0))[middle]]
        found = []
        for rank in range(own_TW.shape[1]):
            late_s, error_s = mean_and_error(own_TW[:, rank] - typical_T)
            if late_s > max(NOTABLE * step_s, CERTAIN * error_s):
                found.append(self._late(rank, times, late_s, error_s))
        found.sort(key=lambda each: -each.excess_s)
        data_s, comm_s = float(np.sort(times[:, :, DATA], axis=1)[:, middle].mean()), float(comm_T.mean())
        if data_s > 2 * NOTABLE * step_s:
            text = f"All loaders are slow: ranks wait {ms(data_s)} of {ms(step_s)} per step for data"
            found.append(Finding(name="all loaders", excess_s=data_s, text=text))
        if comm_s > 2 * NOTABLE * step_s and own_TW.shape[1] > 1:
            text = f"Communication that computing does not hide takes {ms(comm_s)} of {ms(step_s)} per step"
            found.append(self._communication(comm_s, text))
        return found

    def _late(self, rank: int, times_TWF: Array, late_s: float, error_s: float) -> Finding:
        """A rank that arrives late, by the part of its time that exceeds the others' most, and what it did then."""
        mean_WF = times_TWF.mean(axis=0)
        more_F = mean_WF[rank] - np.sort(mean_WF, axis=0)[(len(mean_WF) - 1) // 2]
        more_F[SYNC] = -math.inf
        part = int(more_F.argmax())
        is_data, more_s, own_s = part == DATA, float(more_F[part]), float(mean_WF[rank, part])
        text = (
            f"Rank {rank} {'has a slow loader' if is_data else 'is slow'}: it {DOES[part]} {1e3 * more_s:.1f} +- "
            f"{2e3 * error_s:.1f} ms longer per step than the others ({ms(own_s)}, they {ms(own_s - more_s)})"
        )
        name = f"loader {rank}" if is_data else f"rank {rank} {FIELDS[part]}"
        return Finding(name=name, excess_s=late_s, text=text)

    def _communication(self, comm_s: float, text: str) -> Finding:
        """Communication, and the one slow link behind it where each rank has a link and shows it.

        A link is as fast as the fastest transfer of its rank, sent or received.
        """
        rates_W, num = np.zeros(len(self._rows)), len(self._rows)
        for rank, (rate, peer) in self._links.items():
            rates_W[[rank, peer]] = np.maximum(rates_W[[rank, peer]], rate)
        if len(self._links) < num:
            return Finding(name="network", excess_s=comm_s, text=text)
        slowest, mbit_W = int(rates_W.argmin()), 8e-6 * rates_W
        others = float(np.median(np.delete(mbit_W, slowest)))
        ring_s = 2 * (num - 1) / num * self._rows[0].gradient_bytes / float(rates_W[slowest])
        is_link = mbit_W[slowest] < SLOW_LINK * others and ring_s > EXPLAINS * comm_s
        text += f": the link of rank {slowest} carries {mbit_W[slowest]:.3g} Mbit/s, the others {others:.3g}"
        return Finding(name=f"link {slowest}" if is_link else "network", excess_s=comm_s, text=text)

    # --- what would help

    def _remedies(self, steps_TWF: Array) -> list[Remedy]:
        """Estimate the saving of each remedy, the best first, those that are not worthwhile last."""
        own_TW, comm_T = own_and_communication(steps_TWF)
        data_TW, compute_TW = steps_TWF[:, :, DATA], steps_TWF[:, :, COMPUTE]
        mean_WF, comm_s = steps_TWF.mean(axis=0), float(comm_T.mean())
        now_T = own_TW.max(axis=1) + comm_T
        now_s, num = float(now_T.mean()), len(mean_WF)
        found: list[Remedy] = []

        def saved(own: Array, comm: Array = comm_T, samples: float = 1.0) -> tuple[float, float]:
            """Share of the time per sample, with twice its standard error, of pairs of steps."""
            after_T = (own.max(axis=1) + comm) / samples
            kept = float(after_T.mean()) / now_s
            return 1.0 - kept, 2.0 * mean_and_error((after_T - kept * now_T) / now_s)[1]

        saving, error = saved(own_TW - data_TW)
        is_worthwhile = saving > max(2 * NOTABLE, error)
        found.append(Remedy("loaders that keep up", "more num_workers", saving, error, is_worthwhile))
        if num < 2 or mean_WF[:, -1].min() < 1.0:
            return found

        sizes_W, compute_W, none_W = np.round(mean_WF[:, -1]), np.maximum(mean_WF[:, COMPUTE], 1e-9), np.zeros(num)
        bounds = np.ones(num), np.full(num, 2.0 * sizes_W.max())
        model = StepTime(compute_W / sizes_W, *bounds, none_W, none_W, sync_intercept_s=comm_s)
        divided_W, fixed_W = np.array(model.divide(int(sizes_W.sum()))), FIXED_SHARE * compute_W.min() / compute_W
        for new_W, samples, least, name, how in (
            (divided_W, 1.0, SPLIT_DEAD_BAND, "divide the batch by speed", "attach(model, optimizer, loader)"),
            (2 * sizes_W, 2.0, 2 * NOTABLE, "twice the batch, per sample", 'attach(..., global_batch="adaptive")'),
        ):
            growth_W = new_W / sizes_W - 1.0
            saving, error = saved(own_TW + growth_W * (compute_TW + data_TW), samples=samples)
            doubted, _ = saved(own_TW + growth_W * ((1.0 - fixed_W) * compute_TW + data_TW), samples=samples)
            found.append(Remedy(name, how, saving, math.hypot(error, saving - doubted), saving > max(least, error)))

        for every, permission, name in (
            (1, "lossy", "gradients rounded to int8"),
            (LOCAL_STEPS, "local", f"{LOCAL_STEPS} local steps between averagings, int8"),
        ):
            factor = PRIORS["int8"] / every
            saving, error = saved(own_TW, factor * comm_T)
            error = math.hypot(error, PRIOR_ERROR * factor * comm_s / now_s)
            is_worthwhile = comm_s > BEGIN * now_s and saving > error
            found.append(Remedy(name, f'attach(..., exchange="{permission}")', saving, error, is_worthwhile))
        return sorted(found, key=lambda each: (not each.is_worthwhile, -each.saving))


def usual(steps_TWF: Array) -> Array:
    """The steps without pauses."""
    lengths_T = steps_TWF[:, :, :-1].sum(axis=2).max(axis=1)
    kept: Array = steps_TWF[lengths_T <= PAUSE * np.median(lengths_T)]
    return kept


def own_and_communication(steps_TWF: Array) -> tuple[Array, Array]:
    """Time of each rank that is not waiting, and of each step's communication."""
    times_TWF = steps_TWF[:, :, : len(FIELDS)]
    own_TW: Array = times_TWF.sum(axis=2) - times_TWF[:, :, SYNC]
    comm_T: Array = np.maximum(times_TWF.sum(axis=2).mean(axis=1) - own_TW.max(axis=1), 0.0)
    return own_TW, comm_T


def mean_and_error(values_T: Array) -> tuple[float, float]:
    """Mean and its standard error, by the means of ten blocks: neighbouring steps are alike."""
    blocks = np.array([block.mean() for block in np.array_split(values_T, min(10, len(values_T)))])
    error = float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
    return float(values_T.mean()), error


def ms(seconds: float) -> str:
    """Milliseconds in words."""
    return f"{1e3 * seconds:.3g} ms"


def page(report: Document) -> str:
    """The report as text."""
    ranks, findings, remedies = report["ranks"], report["findings"], report["remedies"]
    summary = (
        f"dynamix watch: {report['num_steps']} steps on {len(ranks)} ranks, {ms(report['step_s'])} each, of which "
        f"{ms(report['communication_s'])} communication ({report['gradient_bytes'] / 1e6:.3g} MB of gradients); "
        f"{report['local_batch_size']:.4g} samples per rank"
    )
    names = ("compute", "wait", "data", "between", "update")
    lines = [summary, "", f"  rank{''.join(f'{name:>10}' for name in names)}  (ms per step)    memory  node"]
    for each in ranks:
        times = "".join(f"{1e3 * each[f'{name}_s']:10.1f}" for name in names)
        lines.append(f"  {each['rank']:4}{times}{each['memory_bytes'] / 1e6:22.0f} MB  {each['node']}")
    lines.append("")
    named, num_windows = report["windows_named"], report["num_windows"]
    lines += [f"{each.text}; in {len(named.get(each.name, ()))} of {num_windows} windows." for each in findings]
    lines += [] if findings else ["No rank, link or loader is slow."]
    if report["num_pauses"]:
        lines.append(f"Left out as pauses, longer than {PAUSE:g} usual steps: {report['num_pauses']}.")
    lines += [f"Note: {note}." for note in report["notes"]]
    if any(each.is_worthwhile for each in remedies):
        lines += ["", "Estimated change of the time per sample; larger batches and local steps may need more samples:"]
    for each in remedies:
        if each.is_worthwhile:
            change = f"{round(-100 * each.saving):+4d} % +- {max(100 * each.error, 1):.0f}"
            lines.append(f"  {change:12}  {each.name:40}  {each.how}")
    rest = ", ".join(f"{each.name} ({round(-100 * each.saving):+d}%)" for each in remedies if not each.is_worthwhile)
    lines += [f"Not worth it here: {rest}."] if rest else []
    return "\n".join(lines)
