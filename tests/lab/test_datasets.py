import gzip
import hashlib
import struct
from pathlib import Path

import pytest

from dynamix.lab.workloads.datasets import (
    CIFAR10,
    FASHION_MNIST,
    CorruptDataError,
    MissingDataError,
    cifar10,
    fashion_mnist,
    read_text,
)

DATA = Path(__file__).parents[2] / ".data" / "fashion-mnist"


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
