"""The run: what is true of this job on this rank right now. Session, steering and checkpoint share this one state."""

from dataclasses import dataclass, field

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.messages.policies import RATE_EXPONENTS, STIGMERGY, STIGMERGY_OPTIONS
from dynamix.trainer.data.orders import DataIdentity
from dynamix.trainer.data.reference_steps import ReferenceSteps
from dynamix.trainer.data.schedule import Schedule
from dynamix.trainer.gradient.noise import NoiseAverage
from dynamix.trainer.job.identity import JobIdentity, Place
from dynamix.trainer.job.options import JobOptions
from dynamix.trainer.job.reporting import Reporter

from .decisions import Decisions
from .field import TraceField
from .tracking import FastLoop, Tracker
from .windows import Windows


@dataclass(kw_only=True)
class Run:
    """One generation of a job, as this rank knows it.

    `data` and `place` never change. Before the first step a loaded state may raise `identity` to a later generation,
    lower its upper bounds, and keep the global batch size that `options` was written for.
    """

    options: JobOptions
    data: DataIdentity
    place: Place
    identity: JobIdentity
    schedule: Schedule = field(init=False)
    noise: NoiseAverage = field(init=False)
    fast_loop: FastLoop = field(init=False)
    traces: TraceField | None = field(init=False)
    """The traces of the agents of all nodes, where these rule."""
    reporter: Reporter = field(init=False)
    decisions: Decisions = field(default_factory=Decisions)
    windows: Windows = field(init=False)
    """Counted from the generation's first step."""
    started: bool = False
    ended: bool = False
    held_out_accuracy: float | None = None
    """The newest that the script reported."""
    num_epochs: int | None = None
    """What `session.epochs` was asked for, by this script or in the saved run; `None` without it."""
    total_samples: int | None = None
    """Samples of the whole planned run, all epochs; `None` when the end is open."""

    def __post_init__(self) -> None:
        """Begin with the options of `attach`, within the bounds that all ranks know."""
        initial = self.options.initial_allocation
        self.schedule = Schedule(self.bounded(initial, self.identity.max_local_batch_sizes))
        self.noise = NoiseAverage(self.options.noise_decay)
        self.windows = self._windows_from(0)
        self.use_identity(self.identity)

    def use_identity(self, identity: JobIdentity) -> None:
        """Take another generation or other upper bounds; speeds tracked so far are dropped."""
        self.identity = identity
        tracker = Tracker(self.options.min_local_batch_size, identity.max_local_batch_sizes)
        self.fast_loop = FastLoop(self.schedule, tracker)
        self.traces = field_of(self.options, identity)
        self.reporter = Reporter(self.options, identity, self.place, self.schedule.newest)

    @property
    def reference_steps(self) -> ReferenceSteps:
        """How samples are counted in steps of the global batch that the script was written for."""
        options = self.options
        return ReferenceSteps(self.data.size, options.base_global_batch_size, options.drop_last)

    def bounded(self, allocation: Allocation, caps: tuple[int, ...]) -> Allocation:
        """An allocation with no size above its rank's bound.

        Where only the sum was decided, or the sum is fixed, what is above one rank's bound goes to the others.
        """
        sizes, lower = allocation.local_batch_sizes, self.options.min_local_batch_size
        if allocation.split != "fixed" or self.options.global_batch == "fixed":
            return allocation.with_sizes(apportion(sum(sizes), sizes, [min(lower, cap) for cap in caps], caps))
        return allocation.with_sizes(tuple(map(min, sizes, caps)))

    def begin(self, first_step: int) -> None:
        """Count windows from a step; the job's specification names what rules it as the initial allocation."""
        self.windows, self.started = self._windows_from(first_step), True
        initial = self.schedule.allocation_at(first_step)
        self.reporter = Reporter(self.options, self.identity, self.place, initial)

    def _windows_from(self, first_step: int) -> Windows:
        options = self.options
        return Windows(options.window_steps, options.margin_steps, options.min_window_s, first_step)

    def specification(self, end_reason: str | None = None) -> Job:
        """The job's specification: running, or ended for a reason."""
        return self.reporter.specification(total_samples=self.total_samples, end_reason=end_reason)


def field_of(options: JobOptions, identity: JobIdentity) -> TraceField | None:
    """The field of a job that the traces of agents rule, as no trace lies in it yet; `None` in all others."""
    if options.policy != STIGMERGY:
        return None
    return TraceField(
        identity.nodes,
        {name: float(value) for name, value in {**STIGMERGY_OPTIONS, **options.policy_options}.items()},
        keeps_global_batch=options.global_batch == "fixed",
        rate_exponent=RATE_EXPONENTS[options.learning_rate_rule],
        base_global_batch_size=options.base_global_batch_size,
    )
