"""The same script, attached: torchrun --standalone --nproc-per-node 2 examples/accelerate_dynamix.py."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynamix.trainer.frameworks.accelerate import attach


def main() -> nn.Module:
    """Train a small classifier on made-up data."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inputs = torch.randn(12_288, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=3 * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    session, loader = attach(accelerator, model, optimizer, loader)
    for epoch in range(3):
        num_correct = 0
        for features, targets in loader:
            with accelerator.accumulate(model):
                outputs = model(features)
                loss = nn.functional.cross_entropy(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            num_correct += accelerator.reduce((outputs.argmax(1) == targets).sum())
        accelerator.print(f"epoch {epoch}: accuracy {num_correct / len(dataset):.4f}, rate {scheduler.get_last_lr()}")
    accelerator.end_training()
    return model


if __name__ == "__main__":
    main()
