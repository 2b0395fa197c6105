#!/bin/sh
# Put Fashion-MNIST (Zalando Research, MIT) into the directory $1, without root: from the files of Debian's package
# dataset-fashion-mnist if it is installed, else by downloading that package and unpacking it.
set -eu
target=${1:?usage: fetch-fashion-mnist.sh DIRECTORY}
installed=/usr/share/datasets/fashion-mnist
mkdir -p "$target"
missing=0
for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
    [ -s "$target/$name-ubyte.gz" ] || missing=1
done
[ "$missing" = 0 ] && exit 0 # put there by hand
if [ -d "$installed" ]; then
    cp "$installed"/*.gz "$target"/
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
download() { (cd "$work" && apt-get download -qq dataset-fashion-mnist 2>"$work/errors"); }
if ! command -v apt-get >/dev/null || ! { download || { apt-get update -qq && download; }; }; then
    [ -s "$work/errors" ] && cat "$work/errors" >&2
    echo "Fashion-MNIST could not be fetched from Debian. Put its four *-ubyte.gz files (github.com/zalandoresearch/" >&2
    echo "fashion-mnist) into $target, or install the package dataset-fashion-mnist, and run make again." >&2
    exit 1
fi
dpkg -x "$work"/dataset-fashion-mnist_*.deb "$work/tree"
cp "$work/tree$installed"/*.gz "$target"/
