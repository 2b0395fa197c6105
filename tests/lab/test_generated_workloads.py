"""The workloads whose gradients are sparse: their data, made from a seed, and their models."""

from functools import cache

import numpy as np
import pytest
import torch
from tests.support import virtual
from torch import nn

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.workloads import Data, make_optimizer, workload_named
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


@pytest.mark.parametrize("name", ["ncf-small", "lstm-zipf-small"])
def test_generated_data_is_the_same_every_time(name: str) -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002 - the global generator must have no part in it
    for part, again in zip(generated_data(name), workload_named(name).load(), strict=True):
        assert torch.equal(part.inputs, again.inputs)
        assert torch.equal(part.labels, again.labels)


def test_generated_data_is_that_of_published_measurements() -> None:
    """Another stream of NumPy's generator, or another order of drawing, would make it other data."""
    users_and_items, taken = choices(CHOICES)
    words, labels = sequences(TEXT)
    assert (users_and_items[0].tolist(), taken[:8].tolist()) == ([5, 0, 8, 18, 7, 32], [0, 2, 4, 4, 0, 2, 1, 0])
    assert (words[0, :20].tolist(), labels[0].tolist()) == (
        [22, 1, 150, 25, 1, 151, 43, 121, 62, 57, 6, 105, 14, 9, 62, 129, 1, 150, 25, 3],
        [0, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 7, 14, 15],
    )


@pytest.mark.parametrize(
    ("name", "counts", "inputs", "labels", "num_places"),
    [
        ("ncf", (360_000, 20_000, 20_000), (6,), (), 5),
        ("ncf-small", (54_000, 3_000, 3_000), (6,), (), 5),
        ("lstm-zipf", (36_000, 2_000, 2_000), (40,), (16,), 24),
        ("lstm-zipf-small", (18_000, 1_000, 1_000), (40,), (16,), 24),
    ],
)
def test_generated_parts_have_the_stated_sizes(
    name: str, counts: tuple[int, ...], inputs: tuple[int, ...], labels: tuple[int, ...], num_places: int
) -> None:
    for part, count in zip(generated_data(name), counts, strict=True):
        assert part.inputs.shape == (count, *inputs)
        assert part.labels.shape == (count, *labels)
        assert part.inputs.dtype == part.labels.dtype == torch.int64
        assert (int(part.inputs.min()), int(part.labels.min())) == (0, 0)
        assert int(part.labels.max()) < num_places


def test_items_offered_together_differ_and_are_popular_by_zipfs_law() -> None:
    inputs, taken = choices(CHOICES)
    items = inputs[:, 1:].sort(1).values
    assert bool((items[:, 1:] > items[:, :-1]).all())
    assert int(inputs[:, 0].max()) == 49
    assert int(items.max()) == 39
    assert taken.bincount(minlength=5).min() > 700  # no place is preferred
    users = inputs[:, 0].bincount(minlength=50).double()
    expected = torch.arange(1, 51, dtype=torch.float64) ** -0.6
    assert (users / 4_000 - expected / expected.sum()).abs().max() < 0.01


def test_candidates_of_a_sequence_differ_and_hold_every_next_word() -> None:
    inputs, labels = sequences(TEXT)
    words, candidates = inputs[:, :16], inputs[:, 16:]
    ordered = candidates.sort(1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    following = candidates.gather(1, labels)
    assert torch.equal(following[:, :-1], words[:, 1:])


def test_four_of_five_words_have_the_class_that_follows() -> None:
    inputs, labels = sequences(TEXT)
    classes = inputs[:, :16] % 8
    following = inputs[:, 16:].gather(1, labels) % 8
    pairs = (8 * classes[:, :-1] + classes[:, 1:]).flatten()
    counts = torch.zeros(64, 8).index_put_((pairs, following[:, 1:].flatten()), torch.ones(1), accumulate=True)
    shares = counts.max(1).values.sum() / counts.sum()
    assert shares.item() == pytest.approx(0.8 + 0.2 / 8, abs=0.01)
    assert len(counts.argmax(1).view(8, 8).unique(dim=0)) > 1  # by the class before the last, too


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


@pytest.mark.parametrize(("name", "chance", "reached"), [("ncf-small", 0.2, 0.4), ("lstm-zipf-small", 0.042, 0.25)])
def test_two_hundred_steps_bring_the_accuracy_well_above_chance(name: str, chance: float, reached: float) -> None:
    workload, data = workload_named(name), generated_data(name)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = make_optimizer("sgd", model.parameters(), 0.05)

    def accuracy() -> float:
        with torch.no_grad():
            return workload.num_correct(model(data.validation.inputs), data.validation.labels) / len(
                data.validation.labels
            )

    assert accuracy() == pytest.approx(chance, abs=0.03)
    for start in range(0, 200 * 64, 64):
        optimizer.zero_grad()
        part = slice(start, start + 64)
        workload.loss(model(data.train.inputs[part]), data.train.labels[part]).backward()
        optimizer.step()
    assert accuracy() > reached


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
