"""Lightning: a callback that replaces the training loader and ends each step.

The Trainer keeps its epochs, accumulation, schedules, validation, logs and checkpoints. While the global batch is fixed
an epoch has as many batches as without us, so whatever counts batches stays right. With an adaptive one the loader has
no length: an epoch ends, and validation runs, when the samples are used up; schedulers of interval "step" are advanced
by samples.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from dynamix.trainer.attach import attach
from dynamix.trainer.session import Session

from .loaders import SessionBatches, batches_per_epoch, require_ddp

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the same under its older name
    from pytorch_lightning import Callback


class DynamixCallback(Callback):
    """Trains with a session: `Trainer(callbacks=[DynamixCallback()])`, nothing else changes.

    The training `DataLoader` comes from wherever Lightning takes it; data set, batch size, order and workers are read
    from it.
    """

    def __init__(self, *, accuracy: str | None = None, **options: Any) -> None:
        """`accuracy` names a logged metric, 0 ... 1, to report; `options` are those of `dynamix.trainer.attach`."""
        self.session: Session | None = None
        """Attached where training starts; after `fit` it is closed, and still answers."""
        self._accuracy = accuracy
        self._options = options
        self._is_adaptive = options.get("global_batch") == "adaptive"
        self._loader: DataLoader[Any] | None = None
        self._gradient_accumulation_steps = 1
        self._saved: dict[str, Any] | None = None
        self._epochs: Iterator[int] = iter(())

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the training loader replaced where Lightning hands it to the strategy."""
        if stage == "fit":
            self.session = self._loader = None
            process = trainer.strategy.process_dataloader
            trainer.strategy.process_dataloader = lambda loader: (
                self._replace(trainer, process(loader)) if trainer.training else process(loader)
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, unless the first batch was fetched already."""
        session = self._attached(trainer)
        if trainer.max_epochs > 0:
            self._epochs = session.epochs(trainer.max_epochs)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch of the session: behind one that was cut short, as Lightning does when it resumes."""
        for epoch in self._epochs:
            if self._is_adaptive or epoch >= trainer.current_epoch:
                return

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a batch of the session: the optimizer has stepped."""
        steps = self._gradient_accumulation_steps
        if trainer.accumulate_grad_batches != steps:
            raise RuntimeError(
                f"accumulate_grad_batches changed from {steps} to {trainer.accumulate_grad_batches} while training: "
                "with DynamixCallback it stays what Trainer was given"
            )
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._attached(trainer).step(loss * steps if isinstance(loss, torch.Tensor) else None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the held-out accuracy."""
        if self.session is not None and self._accuracy in trainer.callback_metrics:
            self.session.evaluated(float(trainer.callback_metrics[self._accuracy]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the job when its last epoch is over."""
        if trainer.current_epoch >= trainer.max_epochs:
            next(self._epochs, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say why the job ended."""
        if self.session is not None:
            self.session.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the session."""
        if stage == "fit":
            vars(trainer.strategy).pop("process_dataloader", None)
            if self.session is not None:
                self.session.close()

    def state_dict(self) -> dict[str, Any]:
        """The session's state, for Lightning's checkpoints."""
        return {} if self.session is None else {"session": self.session.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there once attached."""
        self._saved = state_dict.get("session")

    def _replace(self, trainer: Any, loader: Any) -> SessionBatches:
        if self._loader is not None or not isinstance(loader, DataLoader):
            raise ValueError(
                f"DynamixCallback takes one DataLoader of torch for training, and found {type(loader).__name__}"
                + (" after the first one: no list of loaders, no reloading" if self._loader is not None else "")
            )
        self._loader, self._gradient_accumulation_steps = loader, trainer.accumulate_grad_batches
        num_batches = batches_per_epoch(loader, trainer.world_size, self._gradient_accumulation_steps)
        return SessionBatches(lambda: self._attached(trainer), loader, None if self._is_adaptive else num_batches)

    def _attached(self, trainer: Any) -> Session:
        """The session, attached at the first call."""
        if self.session is not None:
            return self.session
        assert self._loader is not None, "Lightning trains without having asked for its loader"
        if not trainer.optimizers:
            raise RuntimeError(
                "Trainer.estimated_stepping_batches is unknown with global_batch='adaptive': compute the steps of the "
                "schedule from the data set, the batch size and the number of ranks; it is advanced by samples"
            )
        require_ddp(trainer.model, "Lightning")
        options = {
            "gradient_accumulation_steps": self._gradient_accumulation_steps,
            "look_ahead": int(self._is_adaptive),  # Lightning fetches one ahead to find an end that has no number
            **self._options,
        }
        session = attach(trainer.model, trainer.optimizers, self._loader, **options)
        if self._is_adaptive:
            for config in trainer.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    config.interval = "sample"  # none of Lightning's, so that Lightning does not step it
                    session.schedule(config.scheduler)
        if self._saved is not None:
            session.load_state_dict(self._saved)
            self._saved = None
        self.session = session
        return session
