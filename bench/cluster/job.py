"""One rank of the job, on its host: `python -m bench.cluster.job JSON`, with torch's variables in the environment.

It trains a CNN of 105,866 parameters on Fashion-MNIST. A step moves 0.4 MB around and takes a core some 10 ms, so that
a link of 20 Mbit/s and a tenth of a core both hurt. When it has attached it says so on its standard output and waits
for a line on its standard input: the start-up is not to be measured, and would take minutes on a slow host.
"""

import sys

import msgspec
import torch
import torch.distributed as dist
from bench.cluster.plan import Arm, ClusterPlan
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.lab.workloads import workload_named
from dynamix.lab.workloads.datasets import fashion_mnist
from dynamix.trainer import attach

WORKLOAD = "fashion-28-cnn"
"""Two convolutions, which compute, and a linear layer, which is most of what travels."""


def train(plan: ClusterPlan, arm: Arm) -> None:
    """Train for as many steps as the plan says."""
    torch.manual_seed(plan.seed)
    model = DistributedDataParallel(workload_named(WORKLOAD).model())
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate, momentum=0.9)
    session = attach(
        model,
        optimizer,
        fashion_mnist("train", plan.data),
        local_batch_size=arm.local_batch_size,
        min_local_batch_size=plan.min_local_batch_size,
        max_local_batch_size=max(plan.max_local_batch_size, arm.local_batch_size),
        window_steps=plan.window_steps,
        global_batch="adaptive",
        policy=arm.policy,
        seed=plan.seed,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    with session:
        for _ in session.epochs(plan.num_epochs(arm)):
            for inputs, targets in session.loader:
                outputs = model(inputs)
                loss = nn.functional.cross_entropy(outputs, targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                session.step(loss, num_correct=(outputs.argmax(1) == targets).sum())
                if session.step_index == plan.num_steps:
                    return


def main(argument: str) -> None:
    """Join the others and train."""
    plan, arm = msgspec.json.decode(argument, type=tuple[ClusterPlan, Arm])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(plan, arm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
