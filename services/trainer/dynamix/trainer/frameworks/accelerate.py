"""Accelerate: attach to what `Accelerator.prepare` returned.

`accelerator.backward`, `accumulate`, `clip_grad_norm_` and the prepared scheduler stay as they are: the models are
under DDP, whose communication hook weighs. `accelerator.register_for_checkpointing(session)` saves the session too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from dynamix.trainer.attach import attach as attach_session
from dynamix.trainer.session import Session

from .loaders import epoch_of


@dataclass
class AcceleratedBatches:
    """The batches of a session on the accelerator's device, epoch by epoch."""

    session: Session
    loader: DataLoader[Any]
    device: torch.device

    def __len__(self) -> int:
        """Batches of an epoch: whole steps, so with N accumulation steps up to N - 1 more than the plain script has."""
        return len(self.session.loader)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the batches of a session have no {name}, they are no DataLoader; in place of skip_first_batches call "
            "accelerator.register_for_checkpointing(session) and accelerator.load_state(...): then they go on behind "
            "the last batch that was trained on"
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in epoch_of(self.session, self.loader):
            yield send_to_device(batch, self.device)


def attach(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: DataLoader[Any], **options: Any
) -> tuple[Session, AcceleratedBatches]:
    """Attach to prepared models and optimizers; returns the session, and what to iterate over instead of `loader`.

    Each loop over these is an epoch; `session.step(loss)` in a batch reports its loss.

    Args:
        accelerator: what prepared them; its `gradient_accumulation_steps` are kept. With 1, `options` may name another
            number, for a loop that divides each loss itself.
        model: one model, or a list.
        optimizer: one optimizer, or a list.
        loader: the training loader, prepared or not: data set, batch size, order and workers are read from it.
        options: for `dynamix.trainer.attach`. A `local_batch_size` counts all samples of a rank's step.

    Raises:
        ValueError: when the loader makes batches in a way of its own, two numbers of accumulation steps contradict each
            other, or for what `dynamix.trainer.attach` refuses.
    """
    steps = options.get("gradient_accumulation_steps", accelerator.gradient_accumulation_steps)
    if accelerator.gradient_accumulation_steps not in (1, steps):
        raise ValueError(
            f"gradient_accumulation_steps={steps}, but the accelerator divides each loss by its own "
            f"{accelerator.gradient_accumulation_steps}: leave the argument out, or make the accelerator without it"
        )
    session = attach_session(model, optimizer, loader, **{**options, "gradient_accumulation_steps": steps})
    return session, AcceleratedBatches(session, loader, accelerator.device)
