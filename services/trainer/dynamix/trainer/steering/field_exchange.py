"""The exchange of the field: all ranks get the newest traces of all nodes, and the same sizes from them.

Two phases, one step apart, as in `adoption`, at the same steps, and behind it: what an action says of such a job is
that nothing was decided.
"""

from dynamix.trainer.wire.transport import Transport

from .collectives import AnyCollectives
from .run import Run


class FieldExchange:
    """One rank's side of it; in jobs of other policies it does nothing."""

    def __init__(self, run: Run, collectives: AnyCollectives, transport: Transport) -> None:
        self._run = run
        self._collectives = collectives
        self._transport = transport
        self._effective_step: int | None = None
        """From which step on the field rules that is on its way to all ranks."""

    def post(self, effective_step: int) -> None:
        """Send the newest trace of this node's agent to all ranks, to rule from `effective_step` on."""
        run = self._run
        if run.traces is None:
            return
        trace = self._transport.newest_trace
        fits = trace is not None and (trace.job, trace.generation) == (run.identity.job, run.identity.generation)
        mine = {run.place.node: trace} if trace is not None and fits and run.place.local_rank == 0 else {}
        self._collectives.post_numbers(run.traces.numbers_of(mine))
        self._effective_step = effective_step

    def complete(self) -> None:
        """Let the sizes rule that follow from what was sent. Nothing where nothing was posted."""
        effective_step, self._effective_step = self._effective_step, None
        run = self._run
        if effective_step is None or run.traces is None:
            return
        run.traces.take(self._collectives.take_numbers(), run.windows.window_of(effective_step))
        fewest, upper = run.options.min_local_batch_size, run.identity.max_local_batch_sizes
        run.traces.revise(run.schedule, effective_step, fewest, upper)
