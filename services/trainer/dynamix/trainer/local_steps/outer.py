"""The outer step after a round of local steps: where all ranks go, from where they are led to on the mean.

    v <- momentum * v + moved,  theta = theta_start + rate * (moved + momentum * v)

`moved` is the weighted mean of how far the ranks moved. That is SGD with Nesterov momentum on -moved, as DiLoCo has it
(Douillard et al., arXiv 2311.08105, with rate 0.7 and momentum 0.9); rate 1 without momentum is the mean itself, and
computes nothing. All ranks compute the same bits: products and sums of equal numbers, each rounded by itself.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from dynamix.schemas.messages.allocation import Exchange
from dynamix.trainer.communication.model_exchange import ModelExchange
from dynamix.trainer.exchange.codec import BucketView
from dynamix.trainer.exchange.residuals import Residuals


def outer_step(exchange: Exchange, moved: Tensor, velocity: Tensor | None) -> Tensor:
    """How far all ranks go, after how far they moved on the mean; `velocity` changes, and is only needed by momentum.

    Products and sums are apart, since a processor that joins them rounds once instead of twice.
    """
    if not exchange.has_outer_step:
        return moved
    step = moved
    if exchange.outer_momentum:
        assert velocity is not None, "momentum needs it"
        velocity.mul_(exchange.outer_momentum).add_(moved)
        step = velocity.mul(exchange.outer_momentum).add_(moved)
    return step.mul(exchange.outer_rate)


class OuterOptimizer:
    """The outer steps of all models of a session; in memory as much as the models, where there is momentum."""

    def __init__(self) -> None:
        self._velocities: dict[ModelExchange, Residuals] = {}
        """Laid out as buckets are, and kept by parameter, as residuals are."""

    def step(self, exchange: Exchange, model: ModelExchange, bucket: BucketView) -> Tensor:
        """How far a bucket's parameters go; `bucket` has how far they moved on the mean."""
        velocity = self._velocities.setdefault(model, Residuals()).of(bucket) if exchange.outer_momentum else None
        return outer_step(exchange, bucket.flat, velocity)

    def end_round(self, following: Exchange) -> None:
        """Forget the momentum where no other round with momentum follows."""
        if not following.outer_momentum:
            self._velocities.clear()

    def state(self, models: Sequence[ModelExchange]) -> list[dict[str, Tensor]]:
        """The momentum of these models, by parameter; the same on all ranks, copied to the CPU."""
        kept = [self._velocities[each].by_key() if each in self._velocities else {} for each in models]
        return [{key: part.cpu().clone() for key, part in parts.items()} for parts in kept]

    def load_state(self, models: Sequence[ModelExchange], saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from what `state` returned."""
        for model, parts in zip(models, saved, strict=False):
            if parts:
                self._velocities.setdefault(model, Residuals()).load(parts)
