"""The workloads whose gradients are sparse: their data, made from a seed, and their models."""

from functools import cache

import numpy as np
import pytest
import torch
from tests.support import virtual
from torch import nn

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.workloads import Data, workload_named
from dynamix.lab.workloads.generated import ChoiceShape, TextShape, choices, sequences

SPARSE = ("ncf", "ncf-small", "lstm-zipf", "lstm-zipf-small")
TOUCHED_AT_64 = {
    "ncf": (0.002, 0.02),
    "ncf-small": (0.02, 0.1),
    "lstm-zipf": (0.01, 0.05),
    "lstm-zipf-small": (0.05, 0.2),
}
"""Bounds of the share of a gradient's rows that 64 samples touch, over all tables."""
CHOICES = ChoiceShape(num_users=50, num_items=40, num_samples=4_000)
TEXT = TextShape(num_words=160, num_classes=8, num_sequences=3_000)


@cache
def generated_data(name: str) -> Data:
    return workload_named(name).load()


def test_generated_data_is_that_of_published_measurements() -> None:
    """Another stream of NumPy's generator, or another order of drawing, would make it other data."""
    users_and_items, taken = choices(CHOICES)
    words, labels = sequences(TEXT)
    assert (users_and_items[0].tolist(), taken[:8].tolist()) == ([5, 0, 8, 18, 7, 32], [0, 2, 4, 4, 0, 2, 1, 0])
    assert (words[0, :20].tolist(), labels[0].tolist()) == (
        [22, 1, 150, 25, 1, 151, 43, 121, 62, 57, 6, 105, 14, 9, 62, 129, 1, 150, 25, 3],
        [0, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 7, 14, 15],
    )


@pytest.mark.parametrize("name", SPARSE)
def test_a_gradient_is_zero_in_all_rows_that_the_batch_does_not_name(name: str) -> None:
    workload = workload_named(name)
    torch.manual_seed(0)
    model = workload.model()
    part = generated_data(name).train
    inputs, labels = part.inputs[:64], part.labels[:64]
    workload.loss(model(inputs), labels).backward()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    touched = [int((table.grad != 0).any(1).sum()) for table in tables]
    first, second = (inputs[:, :1], inputs[:, 1:]) if name.startswith("ncf") else (inputs[:, :16], inputs[:, 16:])
    named = [len(first.unique()), len(second.unique())] * (len(tables) // 2)
    assert all(0 < rows <= expected for rows, expected in zip(touched, named, strict=True))
    assert sum(touched) > 0.9 * sum(named)  # the perceptron's ReLU may leave a row out
    least, most = TOUCHED_AT_64[name]
    assert least < sum(touched) / sum(len(table) for table in tables) < most
    assert sum(table.numel() for table in tables) > 0.9 * workload.num_parameters


def test_binary_cross_entropy_counts_every_candidate_of_a_sample() -> None:
    workload = workload_named("ncf-small")
    outputs, labels = torch.zeros(3, 5), torch.tensor([0, 2, 4])
    assert workload.loss(outputs, labels).item() == pytest.approx(np.log(2))
    assert workload.loss(outputs, labels, "sum").item() == pytest.approx(3 * np.log(2))
    assert workload.loss(outputs[:0], labels[:0], "sum") == 0.0
    sure = 40 * (2.0 * nn.functional.one_hot(labels, 5) - 1)
    assert workload.loss(sure, labels) < 1e-6
    assert workload.loss(-sure, labels).item() == pytest.approx(40)  # softmax would have had 80
    assert workload.num_correct(sure, labels) == 3
    assert workload.num_correct(sure, labels.roll(1)) == 0


@pytest.mark.parametrize("name", ["ncf-small", "lstm-zipf-small"])
def test_a_virtual_cluster_trains_it(name: str) -> None:
    """Four unequal workers on flattened parameters, measured and unmeasured steps, to above chance."""
    scenario = virtual.scenario(
        workload=name,
        window_steps=10,
        noise_every=3,
        target_accuracy=0.4 if name.startswith("ncf") else 0.25,
        evaluation_samples=1000,
        fixed_time_s=0.0,
        time_limit_s=8.0,
    )
    cluster = VirtualCluster(scenario, generated_data(name), seed=1, policy="static")
    while not cluster.over:
        cluster.run_window()
    assert cluster.evaluations[0].accuracy < 0.3
    assert cluster.time_to_target_s is not None
