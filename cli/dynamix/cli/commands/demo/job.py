"""The demo's training script: plain PyTorch DDP, plus the lines that attach DYNAMIX (marked below).

Ranks are PACED: after the forward pass each sleeps to a stated time per sample, one rank three times longer. Burning
real processor time on a small machine would measure its cores, not the barrier. Gradients, data, processes and
messages are real. Run by `dynamix demo` under torchrun; the plan comes as JSON in the only argument.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.lab.workloads.datasets import fashion_mnist
from dynamix.runtime.die_with_parent import die_with_parent, parent_of
from dynamix.trainer import attach  # DYNAMIX

from . import DemoPlan, DemoStep, is_at_target


def small_cnn() -> nn.Module:
    """Two convolutions and two linear layers: 27,690 parameters, fast on a fraction of a core."""
    convolutions = (nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10))


def train(plan: DemoPlan, arguments: dict[str, Any], log: IO[bytes] | None) -> None:
    """Train until the target is reached and the least number of windows is done; rank 0 writes `log`."""
    rank = dist.get_rank()
    pace_s = plan.pace_s_per_sample * (plan.slowdown if rank == plan.slow_rank else 1.0)
    torch.manual_seed(plan.seed)
    model = DistributedDataParallel(small_cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate, momentum=plan.momentum)
    criterion = nn.CrossEntropyLoss()
    test_images, test_labels = fashion_mnist("test", plan.data).tensors
    part = slice(rank, None, dist.get_world_size())
    held_out = test_images[part], test_labels[part]
    accuracies: list[float] = []
    reached = False
    session = attach(  # DYNAMIX
        model,
        optimizer,
        fashion_mnist("train", plan.data),
        local_batch_size=plan.local_batch_size,
        window_steps=plan.window_steps,
        seed=plan.seed,
        **arguments,
    )
    trained_s, next_evaluation = 0.0, plan.evaluate_every_samples
    for _ in session.epochs(plan.num_epochs):  # DYNAMIX
        started_s = time.perf_counter()
        for inputs, targets in session.loader:  # DYNAMIX
            due_s = time.perf_counter() + session.num_samples * pace_s
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            time.sleep(max(0.0, due_s - time.perf_counter()))
            loss.backward()
            optimizer.step()
            session.step(loss, num_correct=(outputs.argmax(1) == targets).sum())  # DYNAMIX
            step_time_s = time.perf_counter() - started_s
            trained_s += step_time_s
            accuracy = None
            if session.position >= next_evaluation:  # outside the timed part
                next_evaluation += plan.evaluate_every_samples
                accuracy = accuracy_of(model.module, *held_out)
                session.evaluated(accuracy)
                accuracies.append(accuracy)
                reached = reached or is_at_target(accuracies, plan.target_accuracy)
            times = {"trained_s": trained_s, "step_time_s": step_time_s}
            if log is not None:
                line = DemoStep(step=session.step_index, samples=session.position, accuracy=accuracy, **times)
                log.write(msgspec.json.encode(line) + b"\n")
            windows = session.step_index / plan.window_steps
            if (reached and windows >= plan.min_windows) or windows >= plan.max_windows:  # equal on all ranks
                session.close()
                return
            started_s = time.perf_counter()


@torch.no_grad()
def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the held-out images of all ranks that the model classifies correctly; equal on all ranks."""
    correct = (model(images).argmax(1) == labels).sum().double()
    counts = torch.stack([correct, torch.tensor(float(len(labels)), dtype=torch.float64)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    """Join the process group that torchrun describes and train."""
    types = tuple[DemoPlan, dict[str, Any], str, int]
    plan, arguments, log_path, demo = msgspec.json.decode(sys.argv[1], type=types)
    torchrun = os.getppid()
    die_with_parent(torchrun)
    if parent_of(torchrun) != demo:  # torchrun has ended: the demo was killed
        os._exit(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with Path(log_path).open("wb") if dist.get_rank() == 0 else contextlib.nullcontext() as log:
            train(plan, arguments, log)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
