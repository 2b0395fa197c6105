"""Lightning, where its own bookkeeping could go wrong: one process each, with steps that change in length."""

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import Numbered, make_model, offer
from torch import nn
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
NUM_SAMPLES = 100


@pytest.fixture
def lightning() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: make test-frameworks")


def _classifier(lightning: Any, total_steps: int | None = None) -> Any:
    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.used: list[int] = []
            self.num_validations = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.used += batch[2].tolist()
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.num_validations += 1

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = total_steps or self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Classifier()


def _trainer(lightning: Any, callbacks: list[Any], **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 1}
    return lightning.Trainer(
        accelerator="cpu", devices=1, callbacks=callbacks, **{"enable_checkpointing": False, **quiet, **options}
    )


def _callback(**options: Any) -> Any:
    from dynamix.trainer.frameworks.lightning import DynamixCallback  # noqa: PLC0415 - where Lightning is installed

    return DynamixCallback(connect=False, min_local_batch_size=1, window_steps=1, policy="static", **options)


def _loaders() -> tuple[Any, Any]:
    data = Numbered(NUM_SAMPLES)
    return DataLoader(data, batch_size=16, shuffle=True), DataLoader(Numbered(4), batch_size=4)


def test_with_an_adaptive_batch_an_epoch_ends_with_its_samples_and_validation_runs_each_epoch(lightning: Any) -> None:
    steering = _callback(global_batch="adaptive")

    class Halve(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            offer(steering.session, (5,))

    classifier = _classifier(lightning, total_steps=3 * 7)
    trainer = _trainer(lightning, [steering, Halve()], max_epochs=3)
    trainer.fit(classifier, *_loaders())
    assert Counter(classifier.used) == Counter(dict.fromkeys(range(NUM_SAMPLES), 3))
    assert trainer.global_step > 3 * 14
    assert trainer.current_epoch == 3
    assert classifier.num_validations == 1 + 3  # one before training
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_resumed_in_the_middle_of_an_epoch_uses_what_is_left(lightning: Any, tmp_path: Path) -> None:
    first = _classifier(lightning)
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=10)
    trainer = _trainer(lightning, [_callback(), checkpoint], max_epochs=2, max_steps=10, enable_checkpointing=True)
    trainer.fit(first, *_loaders())
    second = _classifier(lightning)
    trainer = _trainer(lightning, [_callback()], max_epochs=2)
    trainer.fit(second, *_loaders(), ckpt_path=checkpoint.best_model_path, weights_only=False)
    assert Counter(first.used + second.used) == Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
    assert trainer.global_step == 14
