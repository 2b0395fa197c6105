"""A plain script for Transformers: torchrun --standalone --nproc-per-node 2 examples/transformers_plain.py."""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    """A small classifier that computes its own loss, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits of a batch."""
        logits = self.layers(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """A batch of the data set."""
    features, labels = zip(*samples, strict=True)
    return {"features": torch.stack(features), "labels": torch.stack(labels)}


def main() -> nn.Module:
    """Train on made-up data."""
    torch.manual_seed(0)
    inputs = torch.randn(13_312, 32)
    targets = (inputs.sum(1) > 0).long()
    train, held_out = TensorDataset(inputs[1024:], targets[1024:]), TensorDataset(inputs[:1024], targets[:1024])
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(Classifier(), arguments, collate, train, held_out)
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: loss {trainer.state.log_history[-2]['eval_loss']:.4f}")
    return trainer.model


if __name__ == "__main__":
    main()
