"""The workloads whose gradients are sparse: their data, made from a seed, and their models."""

import numpy as np
import pytest
import torch
from tests.support import virtual
from torch import nn

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.workloads import workload_named
from dynamix.lab.workloads.generated import ChoiceShape, TextShape, choices, sequences

CHOICES = ChoiceShape(num_users=50, num_items=40, num_samples=4_000)
TEXT = TextShape(num_words=160, num_classes=8, num_sequences=3_000)


def test_generated_data_is_that_of_published_measurements() -> None:
    """Another stream of NumPy's generator, or another order of drawing, would make it other data."""
    users_and_items, taken = choices(CHOICES)
    words, labels = sequences(TEXT)
    assert (users_and_items[0].tolist(), taken[:8].tolist()) == ([5, 0, 8, 18, 7, 32], [0, 2, 4, 4, 0, 2, 1, 0])
    assert (words[0, :20].tolist(), labels[0].tolist()) == (
        [22, 1, 150, 25, 1, 151, 43, 121, 62, 57, 6, 105, 14, 9, 62, 129, 1, 150, 25, 3],
        [0, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 7, 14, 15],
    )


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


def test_a_virtual_cluster_trains_it() -> None:
    """Four unequal workers on flattened parameters, measured and unmeasured steps, to above chance."""
    scenario = virtual.scenario(
        workload="ncf-small",
        window_steps=10,
        noise_every=3,
        target_accuracy=0.4,
        evaluation_samples=1000,
        fixed_time_s=0.0,
        time_limit_s=8.0,
    )
    cluster = VirtualCluster(scenario, workload_named("ncf-small").load(), seed=1, policy="static")
    while not cluster.over:
        cluster.run_window()
    assert cluster.evaluations[0].accuracy < 0.3
    assert cluster.time_to_target_s is not None
