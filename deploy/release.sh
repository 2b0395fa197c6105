#!/bin/sh
# Build a release and try it as its users will: `make dist` runs it.
#
#   sh deploy/release.sh OUTPUT PYTHON DATA [ARGUMENT ...]
#
# OUTPUT takes sdist and wheel; PYTHON is an interpreter with hatchling and venv; DATA has Fashion-MNIST; what follows is
# for `dynamix demo`. The wheel is built from the unpacked sdist, so that what the sdist lacks is found. It is installed,
# with what trains, learns and shows, into an empty environment in a directory of its own, where nothing of the clone can
# be found, and runs the demo there. pip's own variables are followed; torch is the one of constraints.txt.
set -eu
[ $# -ge 3 ] || {
    echo "usage: release.sh OUTPUT PYTHON DATA [ARGUMENT ...]" >&2
    exit 2
}
clone=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "$2") || {
    echo "release.sh: there is no $2" >&2
    exit 1
}
case $python in /*) ;; *) python=$PWD/$python ;; esac
data=$(cd "$3" && pwd)
mkdir -p "$1"
output=$(cd "$1" && pwd)
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
cd "$clone"
"$python" -m hatchling build --target sdist --directory "$work/dist"
mkdir "$work/source"
tar -xzf "$work"/dist/dynamix_batch-*.tar.gz -C "$work/source" --strip-components 1
cd "$work/source"
"$python" -m hatchling build --target wheel --directory "$work/dist"
wheel=$(ls "$work"/dist/dynamix_batch-*.whl)

cd "$work" # nothing of the clone can be imported here
unset PYTHONPATH
"$python" -m venv empty
empty/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c "$clone/constraints.txt" \
    "$wheel[train,cli]"
rm -rf source
found=$(empty/bin/python -P -c 'import dynamix.schemas as package; print(package.__file__)')
case $found in
    "$work"/empty/*) ;;
    *)
        echo "release.sh: $found was imported, and not what was installed" >&2
        exit 1
        ;;
esac
empty/bin/python -m pip check
empty/bin/dynamix demo --data "$data" "$@"
mkdir -p "$output"
cp "$work"/dist/* "$output/"
echo "tried and ready:"
ls -l "$output"/dynamix_batch-*
