"""Residuals under a gradient scaler (`torch.amp.GradScaler`), which skips steps and changes what gradients are worth.

A skipped step throws away what was sent in it, and with it what the residuals gave: they become again what they were
when it began, so that the next step sends them, once. They are in units of scaled gradients: when the scale changes,
they change with it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamix.schemas.messages.allocation import LOSSY_CODECS, Exchange

from .model_exchange import ModelExchange

_log = logging.getLogger("dynamix.trainer")


class GradientScaler(Protocol):
    """What is asked of a scaler."""

    def get_scale(self) -> float:
        """The factor of the losses that follow."""


class ScaledResiduals:
    """Keeps the residuals of a session's models right where a scaler is used."""

    def __init__(self, exchanges: Callable[[], Sequence[ModelExchange]], *, warns: bool) -> None:
        """`exchanges` are those of the models; one rank `warns`."""
        self._exchanges = exchanges
        self._scaler: GradientScaler | None = None
        self._scale = 0.0
        self._warns = warns
        self._has_stepped = False

    def use(self, scaler: GradientScaler) -> None:
        """Follow a scaler from now on."""
        self._scaler, self._scale = scaler, scaler.get_scale()

    def begin_step(self) -> None:
        """Scale what is kept of gradients as the next ones are."""
        if self._scaler is None:
            return
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale != before:
            for each in self._exchanges():
                if not each.is_local:
                    each.scale_residuals(self._scale / before)

    def end_step(self, exchange: Exchange, *, updated: bool) -> None:
        """End a step in which an optimizer stepped, or none did."""
        if updated or exchange.every > 1:
            self._has_stepped = True
        elif self._scaler is not None:
            for each in self._exchanges():
                each.undo_step()
        elif self._warns and self._has_stepped and exchange.codec in LOSSY_CODECS:
            self._warns = False
            _log.warning(
                "no optimizer stepped, and gradients travel by %s: if a gradient scaler skips steps, call "
                "session.use_scaler(scaler), or what was rounded away before such a step is lost",
                exchange.codec,
            )
