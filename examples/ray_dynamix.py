"""The same script, attached: python examples/ray_dynamix.py."""

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dynamix.trainer import attach


def train(config: dict[str, int]) -> None:
    """Train a small classifier on made-up data, in each worker."""
    torch.manual_seed(0)
    inputs = torch.randn(12_288, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = prepare_model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=128, shuffle=True), move_to_device=False)
    session, loader = attach(model, optimizer, loader)
    for epoch in range(config["num_epochs"]):
        loader.sampler.set_epoch(epoch)
        num_correct = num_samples = 0
        for features, targets in loader:
            outputs = model(features)
            loss = nn.functional.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_correct += int((outputs.argmax(1) == targets).sum())
            num_samples += len(targets)
        rank = ray.train.get_context().get_world_rank()
        print(f"epoch {epoch}, rank {rank}: {num_samples} samples, accuracy {num_correct / num_samples:.4f}")
        ray.train.report({"accuracy": num_correct / num_samples})


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=2, use_gpu=False)
    TorchTrainer(
        train, train_loop_config={"num_epochs": 3}, scaling_config=workers, torch_config=TorchConfig(backend="gloo")
    ).fit()
