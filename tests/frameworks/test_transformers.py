"""The Trainer of Transformers: averages over labels, resumed runs, and what it cannot do."""

import os
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import gather
from torch import nn
from torch.utils.data import Dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    *(pytest.mark.slow, pytest.mark.timeout(200)),
    pytest.mark.skipif(find_spec("transformers") is None, reason="Transformers is not installed: make test-frameworks"),
]
NUM_SAMPLES, NUM_LABELS, IGNORED = 150, 3, -100


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """Samples of three labels each, of which a third does not count."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (NUM_SAMPLES, NUM_LABELS), generator=generator)
        self.labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 1 / 3, IGNORED)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"features": self.features[index], "labels": self.labels[index], "index": torch.tensor(index)}


class Labeller(nn.Module):
    """Averages as models of Transformers do: over the labels of the step where it is told their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Linear(6, 4 * NUM_LABELS, dtype=torch.float64)
        self.used: list[int] = []

    def forward(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        index: torch.Tensor,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        self.used += index.tolist()
        logits = self.layers(features).view(-1, 4)
        total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": total / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)}


def _trainer(directory: Path, options: dict[str, Any], **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # noqa: PLC0415 - where it is installed

        from dynamix.trainer.frameworks.transformers import DynamixTrainerMixin  # noqa: PLC0415

    class SteeredTrainer(DynamixTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        dynamix_options = {"connect": False, "min_local_batch_size": 1, **options}  # noqa: RUF012 - of this test

    settings = {"save_strategy": "no", "max_grad_norm": 0.0, "dataloader_pin_memory": False, "disable_tqdm": True}
    training = transformers.TrainingArguments(
        str(directory), use_cpu=True, report_to="none", **{**settings, "per_device_train_batch_size": 8, **arguments}
    )
    return SteeredTrainer(Labeller(), training, train_dataset=Labelled())


def _errors(rank: int, directory: str) -> list[float]:
    """The largest error of each step's gradient against the mean over all counting labels of the step."""
    world = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update({**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    arguments: Any = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 0.0}
    trainer = _trainer(Path(directory), {"local_batch_size": (10, 22)}, **arguments)
    data, errors = Labelled(), []

    from transformers import TrainerCallback  # noqa: PLC0415

    class Compare(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            used = [index for each in gather(trainer.model.used) for index in each]
            trainer.model.used.clear()
            model = Labeller()
            model(data.features[used], data.labels[used], torch.tensor(used))["loss"].backward()
            expected, found = model.layers.weight.grad, trainer.model.layers.weight.grad
            assert expected is not None
            errors.append(float((found - expected).abs().max() / expected.abs().max()))

    trainer.add_callback(Compare())
    trainer.train()
    return errors


def test_each_label_counts_alike_with_unequal_batches(tmp_path: Path) -> None:
    for errors in run_ranks(_errors, 2, str(tmp_path)):
        assert len(errors) == 5  # 150 samples, 32 to a step
        assert max(errors) < 1e-12


def test_a_run_resumed_in_the_middle_of_an_epoch_uses_what_is_left(tmp_path: Path) -> None:
    first = _trainer(tmp_path, {}, num_train_epochs=2, save_strategy="steps", save_steps=12, logging_steps=19)
    used = first.model.used

    from transformers import TrainerCallback  # noqa: PLC0415

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    first.add_callback(Stop())
    first.train()
    second = _trainer(tmp_path, {}, num_train_epochs=2, logging_steps=19)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 2 * 19
    assert [log["epoch"] for log in second.state.log_history if "loss" in log] == [1.0, 2.0]
    assert Counter(used + second.model.used) == Counter(dict.fromkeys(range(NUM_SAMPLES), 2))


def test_an_adaptive_global_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="computes in advance: use global_batch='fixed', the default"):
        _trainer(tmp_path, {"global_batch": "adaptive"}).train()
