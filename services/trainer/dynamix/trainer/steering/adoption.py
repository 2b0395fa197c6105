"""Adoption: an action becomes the allocation of all ranks, from one step on, or of none.

Two phases, one step apart, so that no rank waits for a collective that is still under way:

1. `post`, `margin_steps` before a window begins: rank 0 offers its newest acceptable action to all.
2. `complete`, after the next step: every rank writes the same allocation into its schedule.
"""

import logging

from dynamix.schemas.messages import Action
from dynamix.trainer.data.sampler import PlanSampler, Position
from dynamix.trainer.wire.transport import Transport

from .collectives import AnyCollectives
from .decisions import REFUSALS
from .offers import Offers
from .run import Run

_log = logging.getLogger("dynamix.trainer")


class Adoption:
    """One rank's side of adopting actions, and of the fast loop's own splits."""

    def __init__(self, run: Run, sampler: PlanSampler, collectives: AnyCollectives, transport: Transport) -> None:
        self._run = run
        self._sampler = sampler
        self._collectives = collectives
        self._transport = transport
        self._offers: Offers | None = None
        self._posted: tuple[int, Action | None] | None = None
        """Effective step of the decision that is on its way to all ranks, and its action, known in rank 0."""

    def begin(self) -> None:
        """Accept actions from now on: only rank 0 does."""
        run = self._run
        fixed = run.schedule.newest.global_batch_size if run.options.global_batch == "fixed" else None
        self._offers = Offers(run.identity, run.options, global_batch_size=fixed)

    @property
    def is_posted(self) -> bool:
        """Whether `complete` has something to do."""
        return self._posted is not None

    def post(self, effective_step: int) -> None:
        """Send rank 0's newest action to all ranks, to rule from `effective_step` on."""
        action = self._newest_action(self._run.windows.window_of(effective_step))
        self._collectives.post_decision(None if action is None else action.allocation)
        self._posted = effective_step, action

    def complete(self) -> None:
        """Adopt, or not, what rank 0 sent: every rank the same, at the same step. Nothing where nothing was posted."""
        posted, self._posted = self._posted, None
        if posted is None or (decision := self._collectives.take_decision()) is None:
            return
        effective_step, action = posted
        self._assert_not_drawn(effective_step)
        self._run.schedule.drop_before(effective_step - self._run.options.margin_steps)
        self._run.fast_loop.adopt(effective_step, decision)
        if action is not None:
            self._publish_receipt(action, effective_step)

    def track(self, position: Position, seconds_per_sample: list[float], counts: tuple[int, ...]) -> None:
        """Let the fast loop split again; one step less ahead than `post`, since nothing has to be sent first.

        `counts` are the samples of the step that ended, by rank.
        """
        effective_step = position.step - 1 + self._run.options.margin_steps - 1
        self._assert_not_drawn(effective_step)
        self._run.schedule.drop_before(position.step - 1)
        self._run.fast_loop.observe_times(seconds_per_sample, effective_step, counts)

    def _newest_action(self, effective_window: int) -> Action | None:
        """The action that rank 0 offers to all."""
        if self._offers is None:
            return None
        for action in self._transport.take_actions():
            if (reason := self._offers.consider(action, effective_window)) is not None:
                _log.info("refused the action of window %d: %s", action.window, REFUSALS[reason])
        adopted = self._offers.adopt(effective_window)
        self._run.decisions.note(effective_window, adopted, self._offers.last_refused)
        self._offers.last_refused = None
        return adopted

    def _publish_receipt(self, action: Action, effective_step: int) -> None:
        assert self._offers is not None
        malformed = self._transport.num_malformed
        receipt = self._run.reporter.receipt(
            action,
            effective_window=self._run.windows.window_of(effective_step),
            effective_step=effective_step,
            num_refused={**self._offers.num_refused, **({"malformed": malformed} if malformed else {})},
        )
        self._transport.publish(receipt)

    def _assert_not_drawn(self, effective_step: int) -> None:
        drawn = self._sampler.last_drawn_step
        assert effective_step > drawn, f"step {effective_step} may change, but step {drawn} is drawn already"
