"""Workloads: models and losses, data sets as files, generated data."""

import gzip
import hashlib
import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import virtual
from torch import nn

from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.workloads import WORKLOADS, Data, workload_named
from dynamix.lab.workloads.datasets import (
    CIFAR10,
    FASHION_MNIST,
    CorruptDataError,
    MissingDataError,
    cifar10,
    fashion_mnist,
    read_text,
)
from dynamix.lab.workloads.generated import ChoiceShape, TextShape, choices, sequences
from dynamix.lab.workloads.models import Transformer

DATA = Path(__file__).parents[2] / ".data"
SHAPES = {"fashion-14": (1, 14, 14), "fashion-28": (1, 28, 28), "cifar10": (3, 32, 32)}
PARAMETERS = {
    "fashion-14-mlp": 196 * 64 + 64 + 64 * 10 + 10,
    "fashion-28-mlp": 784 * 128 + 128 + 128 * 10 + 10,
    "fashion-14-cnn": 80 + (8 * 16 * 9 + 16) + (144 * 64 + 64) + 650,
    "fashion-28-cnn": 160 + (16 * 32 * 9 + 32) + (1568 * 64 + 64) + 650,
    "cifar10-vgg11": 9 * (3 * 64 + 64 * 128 + 128 * 256 + 256**2 + 256 * 512 + 3 * 512**2) + 2752 + 5130,
    "cifar10-resnet20": 269_722,  # He et al., table 6: 0.27 M
    "text-transformer": 137_216,
    "ncf": 4 * 20_000 * 32 + (64 * 32 + 32) + (32 * 16 + 16) + 49,
    "ncf-small": 4 * 2_000 * 8 + (16 * 8 + 8) + (8 * 4 + 4) + 13,
    "lstm-zipf": 2 * 32_000 * 32 + 4 * 96 * (32 + 96 + 2) + (96 * 32 + 32),
}


@cache
def generated_data(name: str) -> Data:
    return workload_named(name).load(None)


def samples(name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up samples of the shapes that the workload takes."""
    generator = torch.Generator().manual_seed(3)
    if name.startswith(("ncf", "lstm")):
        return tuple(tensor[:count] for tensor in generated_data(name).train)
    if name.startswith("text"):
        tokens = torch.randint(0, 256, (count, 65), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = next(shape for prefix, shape in SHAPES.items() if name.startswith(prefix))
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 10, (count,), generator=generator)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_number_of_parameters_is_that_of_the_published_model(name: str) -> None:
    workload = workload_named(name)
    assert workload.num_parameters == PARAMETERS[name]
    assert workload.gradient_bytes == 4 * PARAMETERS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_gradients_of_parts_of_a_batch_add_up_to_that_of_the_batch(name: str) -> None:
    """No layer looks at the batch: the sum is the same for every division of the samples."""
    workload = workload_named(name)
    torch.manual_seed(0)
    model = workload.model().double()
    inputs, labels = samples(name, 5)

    def gradient(part: slice) -> torch.Tensor:
        loss = workload.loss(model(inputs[part]), labels[part], "sum")
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    whole = gradient(slice(None))
    parts = sum(gradient(part) for part in (slice(0, 1), slice(1, 5), slice(5, 5)))
    assert whole.norm() > 0
    assert (parts - whole).norm() / whole.norm() < 1e-12


@pytest.mark.parametrize("name", ["fashion-14-mlp", "text-transformer"])
def test_losses_and_right_answers_count_samples_not_tokens(name: str) -> None:
    workload = workload_named(name)
    labels = samples(name, 4)[1]
    outputs = nn.functional.one_hot(labels, 256).double() * 100  # right and sure of it
    outputs[3] = -outputs[3]  # the last sample is all wrong
    assert workload.num_correct(outputs, labels) == 3.0
    assert workload.loss(outputs, labels, "sum") == pytest.approx(4 * workload.loss(outputs, labels).item())
    assert workload.loss(outputs[:3], labels[:3], "sum") < 1e-6
    assert workload.loss(outputs, labels, "sum") > 100  # one sample's mean, not 64 tokens' sum
    assert workload.loss(outputs, labels, "sum") < 110
    assert workload.loss(outputs[:0], labels[:0], "sum") == 0.0


def test_a_byte_is_predicted_from_earlier_bytes_only() -> None:
    torch.manual_seed(0)
    model = Transformer(16, width=32, num_heads=4, num_layers=2).double()
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_fashion_mnist_is_split_scaled_and_pooled_as_stated() -> None:
    small, large = (workload_named(f"fashion-{width}-mlp").load(DATA) for width in (14, 28))
    for part, other, count in zip(small, large, (50_000, 10_000, 10_000), strict=True):
        assert part.inputs.shape == (count, 1, 14, 14)
        assert other.inputs.shape == (count, 1, 28, 28)
        assert torch.equal(part.labels, other.labels)
    assert small.train.inputs.mean().abs() < 0.01
    assert small.train.inputs.std() == pytest.approx(1, abs=0.01)
    corner = large.test.inputs[7, 0, 10:12, 20:22].mean() * 0.3530  # both have the same mean subtracted
    assert small.test.inputs[7, 0, 5, 10].item() * 0.3301 == pytest.approx(corner.item(), abs=1e-5)


def test_a_text_is_cut_into_sequences_and_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(bytes(range(100)) * 64)  # 6400 bytes: 99 sequences, 4 + 4 held out
    data = workload_named("text-transformer").load(tmp_path)
    assert [len(part.labels) for part in data] == [91, 4, 4]
    assert data.train.inputs[1].tolist() == list(range(64, 100)) + list(range(28))
    assert torch.equal(data.train.labels[0], data.train.inputs[0] + 1)
    assert data.validation.inputs[0, 0] == (91 * 64) % 100
    assert data.test.labels[-1, -1] == (99 * 64) % 100


# --- data sets as files ---


def _idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values


def test_missing_data_names_the_file_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"train-images-idx3-ubyte\.gz in .* Get it with `make data`"):
        fashion_mnist("train", tmp_path)


def test_packed_and_unpacked_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = _idx((2, 1, 2), bytes((0, 255, 51, 102))), _idx((2,), bytes((3, 1)))
    files = (
        ("images", hashlib.md5(images).hexdigest()),
        ("labels", hashlib.md5(labels).hexdigest()),
    )
    monkeypatch.setitem(FASHION_MNIST.files, "test", files)
    (tmp_path / "images.gz").write_bytes(gzip.compress(images))
    (tmp_path / "labels").write_bytes(labels)
    pixels, found = fashion_mnist("test", tmp_path).tensors
    assert found.tolist() == [3, 1]
    assert (pixels * 0.3530 + 0.2860).flatten().tolist() == pytest.approx([0, 1, 0.2, 0.4], abs=1e-6)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    name = FASHION_MNIST.files["test"][0][0]
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(_idx((1,), b"x")))
    with pytest.raises(CorruptDataError, match="fetch it again"):
        fashion_mnist("test", tmp_path)
    (tmp_path / f"{name}.gz").write_bytes(b"no gzip")
    with pytest.raises(CorruptDataError, match="cannot be unpacked"):
        fashion_mnist("test", tmp_path)


def test_cifar_is_joined_in_the_order_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [bytes((label,)) + bytes((pixel,)) * 3072 for label, pixel in ((3, 10), (8, 20))]
    files = tuple((f"{n}.bin", hashlib.md5(content).hexdigest()) for n, content in enumerate(contents))
    monkeypatch.setitem(CIFAR10.files, "train", files)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for (file, _), content in zip(files, contents, strict=True):
        (tmp_path / "cifar-10-batches-bin" / file).write_bytes(content)
    pixels, labels = cifar10("train", tmp_path)
    assert labels.tolist() == [3, 8]
    assert pixels[:, 2, 31, 31].tolist() == [10, 20]


def test_texts_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zwei")
    (tmp_path / "a.txt").write_text("drei é")
    assert bytes(read_text(tmp_path).tolist()) == "drei ézwei".encode()


# --- generated data ---

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
    cluster = VirtualCluster(scenario, workload_named("ncf-small").load(None), seed=1, policy="static")
    while not cluster.over:
        cluster.run_window()
    assert cluster.evaluations[0].accuracy < 0.3
    assert cluster.time_to_target_s is not None
