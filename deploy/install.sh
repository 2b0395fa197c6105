#!/bin/sh
# Install DYNAMIX with systemd on this machine, secured by TLS and keys, or bring it up to date. As root, in a clone:
#
#   sh deploy/install.sh [OPTION ...] [WHEEL]
#
#   --host NAME    a name or address by which other machines reach this broker; may be given again
#   --node BROKER  a machine that only trains: the collector alone; BROKER is the other machine's name
#   --ebpf         the collector counts in the kernel (needs python3-bpfcc and kernel headers)
#   --learner      also the learner, with PyTorch
#   --no-start     install and enable, but start nothing
#
# WHEEL is a release to install instead of the clone. A second run changes nothing but what is new: options of the first
# one still hold, certificates and keys stay (make-secrets.sh), and so does configuration that was edited, with the new
# one beside it as FILE.new. Services are restarted, the broker is not. uninstall.sh takes all of it back.
#
# DESTDIR=DIRECTORY installs into that directory instead, for a package or an image, without root: nothing is started.
# PYTHON=... is the interpreter (3.11 or newer, with venv); pip's own variables (PIP_INDEX_URL, ...) are followed.
set -eu
deploy=$(cd "$(dirname "$0")" && pwd)
source=$(dirname "$deploy")
root=${DESTDIR:-}
root=${root%/}
python=${PYTHON:-python3}
prefix=/opt/dynamix
share=$root$prefix/share/dynamix
node= broker= ebpf= learner= hosts= start=1 program=$source

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

units=$root/etc/systemd/system

while [ $# -gt 0 ]; do
    argument=$1
    shift
    case $argument in
        --host | --node)
            case ${1:-} in '' | -* | *[!A-Za-z0-9.:-]*) fail "$argument needs a host name or an address" ;; esac
            if [ "$argument" = --node ]; then node=1 broker=$1; else hosts="$hosts $1"; fi
            shift
            ;;
        --ebpf) ebpf=1 ;;
        --learner) learner=1 ;;
        --no-start) start= ;;
        --help | -h)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        -*) fail "unknown option $argument: see --help" ;;
        *.whl) program=$argument ;;
        *) fail "$argument is not a wheel: name a file that ends with .whl, or none" ;;
    esac
done
if [ -z "$root" ]; then
    [ -d /run/systemd/system ] || fail "systemd does not run here: deploy/README.md has other ways (Containers)"
    [ "$(id -u)" = 0 ] || fail "run it as root, or with DESTDIR=DIRECTORY"
fi
[ ! -e "$units/dynamix-collector.service.d/ebpf.conf" ] || ebpf=1
[ ! -e "$units/dynamix-learner.service" ] || learner=1
[ ! -e "$units/dynamix-collector.service" ] || [ -e "$units/dynamix-nats.service" ] || node=1
[ -z "$node" ] || [ -z "$hosts$learner" ] || fail "--host and --learner are for the broker's machine, not for --node"
[ -e "$program" ] || fail "there is no $program"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is not Python 3.11 or newer: name another interpreter with PYTHON=..."
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no module venv: apt-get install python3-venv"

# A copy of each file as it was installed tells an edited one from an old one.
install_configuration() {
    target=$root/etc/dynamix/$(basename "$1")
    pristine=$share/installed/$(basename "$1")
    if [ ! -e "$target" ] || cmp -s "$1" "$target" || cmp -s "$pristine" "$target"; then
        install -m 644 "$1" "$target"
        rm -f "$target.new"
    elif ! cmp -s "$1" "$pristine"; then
        install -m 644 "$1" "$target.new"
        echo "kept $target, which was edited; the new one is $target.new"
    fi
    install -m 644 "$1" "$pristine"
}

# The program. With DESTDIR it is made where it shall not stay: its scripts get the path that they will have.
[ -x "$root$prefix/bin/python" ] || "$python" -m venv "$root$prefix"
"$root$prefix/bin/python" -m pip install --quiet --disable-pip-version-check -c "$source/constraints.txt" \
    "$program[cli${learner:+,train}]"
if [ -n "$root" ]; then
    grep -rlIF "$root$prefix" "$root$prefix/bin" "$root$prefix/pyvenv.cfg" | while read -r file; do
        sed -i "s|$root$prefix|$prefix|g" "$file"
    done
fi

install -d -m 755 "$root/etc/dynamix" "$root/etc/dynamix/train" "$share/installed" "$root$prefix/share/doc/dynamix"
install -m 644 "$deploy/README.md" "$root$prefix/share/doc/dynamix/"
install -m 755 "$deploy/uninstall.sh" "$share/"
install_configuration "$deploy/systemd/dynamix.env"
if [ -n "$node" ]; then
    [ -z "$broker" ] || sed -i "s|^DYNAMIX_NATS_URL=.*|DYNAMIX_NATS_URL=tls://$broker:4222|" "$root/etc/dynamix/dynamix.env"
    install -d -m 700 "$root/etc/dynamix/credentials"
else
    install_configuration "$deploy/nats.conf"
    # shellcheck disable=SC2086 # host names, one word each
    DYNAMIX="$root$prefix/bin/python -m dynamix.cli.main" sh "$deploy/make-secrets.sh" "$root/etc/dynamix" $hosts
fi

services="dynamix-collector"
[ -n "$node" ] || services="$services dynamix-reward dynamix-arbitrator"
[ -z "$learner" ] || services="$services dynamix-learner"
central=
[ -n "$node" ] || central="dynamix-nats dynamix-provision"
install -d -m 755 "$units"
for unit in $central $services dynamix-train@; do
    install -m 644 "$deploy/systemd/$unit.service" "$units/"
done
[ -z "$hosts" ] || install -D -m 644 "$deploy/systemd/dynamix-nats.service.d/other-machines.conf" \
    -t "$units/dynamix-nats.service.d"
[ -z "$ebpf" ] || install -D -m 644 "$deploy/systemd/dynamix-collector.service.d/ebpf.conf" \
    -t "$units/dynamix-collector.service.d"

# What only the operator can bring, and without which the collector cannot start.
wanting=
for file in ca.pem credentials/collector.creds; do
    [ -s "$root/etc/dynamix/$file" ] || wanting="$wanting /etc/dynamix/$file"
done
if [ -n "$wanting" ]; then
    echo "Not started yet; missing:$wanting. On the broker's machine make this node's key:
    dynamix keys create $(hostname) --role collector --node NODE -o collector.creds    # NODE: see \`dynamix doctor\` here
Copy it to /etc/dynamix/credentials/collector.creds and the broker's /etc/dynamix/ca.pem to here; then here:
    systemctl start dynamix-collector"
fi

# shellcheck disable=SC2086 # names of units, one word each
if [ -n "$root" ]; then
    if command -v systemctl >/dev/null; then
        systemctl --quiet --root="$root" enable $central $services
    else
        echo "no systemctl here: enable on the machine itself:" $central $services
    fi
    exit 0
fi
systemctl daemon-reload
# shellcheck disable=SC2086
systemctl --quiet enable $central $services
{ [ -n "$start" ] && [ -z "$wanting" ]; } || exit 0
if [ -n "$central" ]; then
    systemctl start dynamix-nats
    systemctl reload dynamix-nats # it may run with the configuration of before
    systemctl restart dynamix-provision # brings the streams up to date
    if [ -e /etc/dynamix/authority/authority.json ]; then # permissions of this version, consumers of new keys
        (set -a && . /etc/dynamix/dynamix.env && "$prefix/bin/dynamix" keys refresh)
    fi
fi
# shellcheck disable=SC2086
systemctl restart $services # returns once they are ready
# shellcheck disable=SC2086
echo "running:" $central $services
