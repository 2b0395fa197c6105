"""Train a workload by name, steered: a real DDP job of the kind that the virtual cluster simulates.

dynamix train -- --standalone --nproc-per-node 2 examples/ddp_workload.py --workload cifar10-vgg11
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dynamix.lab.workloads import OPTIMIZERS, WORKLOADS, Part, Workload, make_optimizer, workload_named
from dynamix.schemas.policies import DEFAULT_POLICY
from dynamix.trainer import attach

EVALUATION_BATCH = 500


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="fashion-14-mlp")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the data set is (default: the usual places)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--local-batch-size", type=int, default=64)
    parser.add_argument("--min-local-batch-size", type=int, default=8)
    parser.add_argument("--max-local-batch-size", type=int, default=1024)
    parser.add_argument("--window-steps", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--num-samples", type=int, help="train on the first so many samples, and steer by as many")
    parser.add_argument("--evaluate-every", type=float, default=30.0, metavar="SECONDS", help="of training time")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class PeriodicEvaluation:
    """Validation accuracy every so many seconds, each rank on its share of the samples."""

    def __init__(self, workload: Workload, part: Part, device: torch.device, every_s: float) -> None:
        self._workload = workload
        self._num_samples = len(part.labels)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        self._part = Part(*(tensor[mine].to(device) for tensor in part))
        self._every_s, self._due_s = every_s, every_s

    def is_due(self, trained_s: float) -> bool:
        """Whether to evaluate now; equal on all ranks, as rank 0's clock says."""
        due = torch.tensor([trained_s >= self._due_s], dtype=torch.uint8, device=self._part.labels.device)
        dist.broadcast(due, 0)
        self._due_s += self._every_s if due else 0.0
        return bool(due)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        """Over all ranks' shares."""
        batches = zip(*(tensor.split(EVALUATION_BATCH) for tensor in self._part), strict=True)
        correct = sum(self._workload.num_correct(model(inputs), labels) for inputs, labels in batches)
        total = torch.tensor(correct, dtype=torch.float64, device=self._part.labels.device)
        dist.all_reduce(total)
        return float(total) / self._num_samples


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train for all epochs; rank 0 prints what the validation part says."""
    workload = workload_named(arguments.workload)
    data = workload.load(arguments.data)
    some = slice(arguments.num_samples)
    torch.manual_seed(arguments.seed)
    model = DistributedDataParallel(workload.model().to(device))
    optimizer = make_optimizer(arguments.optimizer, model.parameters(), arguments.learning_rate)
    evaluator = PeriodicEvaluation(
        workload, Part(*(t[some] for t in data.validation)), device, arguments.evaluate_every
    )
    session = attach(
        model,
        optimizer,
        TensorDataset(*(tensor[some] for tensor in data.train)),
        name=workload.name,
        local_batch_size=arguments.local_batch_size,
        min_local_batch_size=arguments.min_local_batch_size,
        max_local_batch_size=arguments.max_local_batch_size,
        window_steps=arguments.window_steps,
        global_batch="adaptive",
        policy=arguments.policy,
        seed=arguments.seed,
    )
    trained_s, started_s = 0.0, time.perf_counter()

    def evaluate() -> None:
        session.evaluated(accuracy := evaluator.accuracy(model.module))
        if dist.get_rank() == 0:
            sizes = session.local_batch_sizes
            print(f"{trained_s:.1f} s, {session.position} samples, sizes {sizes}: accuracy {accuracy:.4f}", flush=True)

    for _ in session.epochs(arguments.epochs):
        for inputs, labels in session.loader:
            outputs = model(inputs.to(device))
            targets = labels.to(device)
            loss = workload.loss(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(loss, num_correct=workload.num_correct(outputs, targets))
            trained_s += time.perf_counter() - started_s
            if session.step_index % arguments.window_steps == 0 and evaluator.is_due(trained_s):
                evaluate()
            started_s = time.perf_counter()
    evaluate()


def main() -> None:
    """Join the process group that torchrun describes and train."""
    arguments = parse_arguments()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
