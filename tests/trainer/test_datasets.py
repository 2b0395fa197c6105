import gzip
import hashlib
import struct
from pathlib import Path

import pytest
import torch

from dynamix.trainer import datasets
from dynamix.trainer.datasets import CorruptDataError, PublishedFile, MissingDataError, fashion_mnist, read_idx

DATA = Path(__file__).parents[2] / ".data" / "fashion-mnist"


def _idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values


def test_the_test_split_is_the_publishers() -> None:
    images, labels = fashion_mnist("test", DATA).tensors
    assert images.shape == (10_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert torch.bincount(labels).tolist() == [1000] * 10
    assert images.mean().abs() < 0.01
    assert images.std() == pytest.approx(1.0, abs=0.01)
    assert labels[:5].tolist() == [9, 2, 1, 1, 6]


def test_what_is_missing_and_how_to_get_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError) as error:
        fashion_mnist("train", tmp_path)
    for part in (str(tmp_path), "train-images-idx3-ubyte.gz", "make data", "dataset-fashion-mnist", "zalandoresearch"):
        assert part in str(error.value)


def test_packed_and_unpacked_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = _idx((2, 1, 2), bytes((0, 255, 51, 102))), _idx((2,), bytes((3, 1)))
    files = (
        PublishedFile("images", hashlib.md5(images).hexdigest()),
        PublishedFile("labels", hashlib.md5(labels).hexdigest()),
    )
    monkeypatch.setitem(datasets.FASHION_MNIST_FILES, "test", files)
    (tmp_path / "images.gz").write_bytes(gzip.compress(images))
    (tmp_path / "labels").write_bytes(labels)
    pixels, found = fashion_mnist("test", tmp_path).tensors
    assert found.tolist() == [3, 1]
    assert (pixels * 0.3530 + 0.2860).flatten().tolist() == pytest.approx([0, 1, 0.2, 0.4], abs=1e-6)


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    name = datasets.FASHION_MNIST_FILES["test"][0].name
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(_idx((1,), b"x")))
    with pytest.raises(CorruptDataError, match="fetch it again"):
        fashion_mnist("test", tmp_path)
    (tmp_path / f"{name}.gz").write_bytes(b"no gzip")
    with pytest.raises(CorruptDataError, match="cannot be unpacked"):
        fashion_mnist("test", tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01", _idx((3,), b"ab"), bytes((0, 0, 8, 3, 0, 0))])
def test_what_is_no_idx_file_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptDataError):
        read_idx(content, "images")
