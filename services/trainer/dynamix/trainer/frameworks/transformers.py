"""Transformers: a mixin for its Trainer, which replaces the training loader and ends each step.

Epochs, schedule, accumulation, logs and checkpoints stay the Trainer's: an epoch has as many steps as without us. Where
the Trainer counts the labels of a step over all ranks, to average over them, each label still counts alike.
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from dynamix.trainer.attach import attach
from dynamix.trainer.session import Session

from .loaders import SessionBatches, batches_per_epoch, require_ddp

_log = logging.getLogger("dynamix.trainer")

STATE_FILE = "dynamix.pt"
"""File of the session's state in each of the Trainer's checkpoints."""


class DynamixTrainerMixin:
    """Trains with a session: `class SteeredTrainer(DynamixTrainerMixin, Trainer)`, to be used like `Trainer`."""

    dynamix_options: ClassVar[Mapping[str, Any]] = {}
    """Options of `dynamix.trainer.attach`; set them in your class."""
    session: Session | None = None
    """While training."""
    newest_loss: torch.Tensor | None = None
    """The loss of the batch under way."""
    _resume_path: str | None = None
    _loss_factor = 1.0
    _ends_steps = False

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, perhaps from a checkpoint: the session continues at its position in the data."""
        found = resume_from_checkpoint
        self._resume_path = get_last_checkpoint(self.args.output_dir) if found is True else found or None
        if self._resume_path is not None:
            self.args.ignore_data_skip = True  # the session begins behind what was used: there is nothing to skip
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            if self.session is not None:
                self.session.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self.session = None

    def get_train_dataloader(self: Any) -> SessionBatches:
        """The batches of a session, in place of the Trainer's own loader."""
        if self.dynamix_options.get("global_batch") == "adaptive":
            raise ValueError(
                "the Trainer of Transformers stops, schedules and logs by a number of steps that it computes in "
                "advance: use global_batch='fixed', the default"
            )
        steps, world_size = self.args.gradient_accumulation_steps, self.args.world_size
        loader = super().get_train_dataloader()  # type: ignore[misc]
        options = {
            "gradient_accumulation_steps": steps,
            "look_ahead": steps - 1,  # the Trainer fetches all batches of a step at once
            **self.dynamix_options,
        }

        def attached() -> Session:
            session: Session | None = self.session
            if session is None:
                require_ddp(self.model_wrapped, "the Trainer of Transformers")
                self.session = session = attach(self.model_wrapped, self.optimizer, loader, **options)
                path = self._resume_path and Path(os.fspath(self._resume_path)) / STATE_FILE
                if path and path.exists():
                    session.load_state_dict(torch.load(path, weights_only=True))
                elif path and (not dist.is_initialized() or dist.get_rank() == 0):
                    _log.warning("there is no %s: the data are used from the beginning of an epoch", path)
            return session

        if not self._ends_steps:
            self._ends_steps = True
            self.add_callback(_StepEnds(self))
        return SessionBatches(attached, loader, batches_per_epoch(loader, world_size, steps))

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one batch."""
        is_counted = num_items_in_batch is not None and (self.model_accepts_loss_kwargs or self.compute_loss_func)
        if is_counted and self.args.world_size > 1 and self.session.num_samples:
            if not self.args.average_tokens_across_devices:
                raise ValueError(
                    "average_tokens_across_devices=False gives each rank's labels a weight of their own: leave it at "
                    "True"
                )
            # each rank's loss is in proportion to all labels: this cancels the weight of its samples
            weight = self.session.num_samples * self.args.gradient_accumulation_steps * self.args.world_size
            self._loss_factor = float(self.session.global_batch_size / weight)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch) / self._loss_factor  # type: ignore[misc]
        self._loss_factor = 1.0
        self.newest_loss = loss * self.current_gradient_accumulation_steps
        return loss

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss; in training one that is averaged over the labels of all ranks is freed of their weights."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if self._loss_factor == 1.0:
            return found
        return (found[0] * self._loss_factor, found[1]) if return_outputs else found * self._loss_factor


class _StepEnds(TrainerCallback):
    """Ends the session's epochs and batches where the Trainer ends its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epochs: Iterator[int] = iter(())
        self._steps_per_epoch = 1

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self._steps_per_epoch = len(train_dataloader) // args.gradient_accumulation_steps
        self._epochs = train_dataloader.attached().epochs(math.ceil(state.num_train_epochs))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        next(self._epochs, None)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.session.step(self._trainer.newest_loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.session.step(self._trainer.newest_loss)
        # the Trainer counts batches since the loop over its loader began, which a resumed run begins inside of an epoch
        state.epoch = state.global_step / self._steps_per_epoch

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 0:
            directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(self._trainer.session.state_dict(), directory / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            next(self._epochs, None)
        self._trainer.session.close()
