"""A plain script for Lightning: torchrun --standalone --nproc-per-node 2 examples/lightning_plain.py."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    """A small classifier; its schedule counts the steps that Lightning expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        accuracy = (self.layers(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        """SGD under a one-cycle schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> nn.Module:
    """Train on made-up data."""
    torch.manual_seed(0)
    inputs = torch.randn(13_312, 32)
    targets = (inputs.sum(1) > 0).long()
    train, held_out = TensorDataset(inputs[1024:], targets[1024:]), TensorDataset(inputs[:1024], targets[:1024])
    model = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=256))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps: accuracy {trainer.callback_metrics['accuracy']:.4f}, rate {rate:.2g}")
    return model


if __name__ == "__main__":
    main()
