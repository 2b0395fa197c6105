#!/bin/sh
# Install DYNAMIX with systemd on this machine, or bring it up to date. As root, in a clone of the repository:
#
#   sh deploy/install.sh [OPTION ...] [WHEEL]
#
#   --node       a machine that only trains: the collector alone, whose broker is another machine
#   --ebpf       the collector counts in the kernel (needs python3-bpfcc and kernel headers)
#   --tls        the broker is for several machines: certificate and key in /etc/dynamix/tls
#   --learner    also the learner, with PyTorch
#   --shard NAME also services for another account of the broker: README.md, Shards; may be given again
#   --no-start   install and enable, but start nothing
#
# WHEEL is a release to install instead of the clone. A second run changes nothing but what is new: options of the first
# one still hold, passwords stay, and so does configuration that was edited, with the new one beside it as FILE.new.
# Services are restarted, the broker is not. uninstall.sh takes all of it back.
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
node= ebpf= tls= learner= shards= start=1 program=$source

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

units=$root/etc/systemd/system

add_shard() {
    case $1 in
        '' | -* | *[!a-z0-9-]*) fail "'$1' is no shard: name it as \`dynamix keys shard\` did" ;;
    esac
    [ ${#1} -le 63 ] || fail "'$1' is no shard: a name has at most 63 characters"
    case " $shards " in
        *" $1 "*) ;;
        *) shards="$shards $1" ;;
    esac
}

while [ $# -gt 0 ]; do
    argument=$1
    shift
    case $argument in
        --node) node=1 ;;
        --ebpf) ebpf=1 ;;
        --tls) tls=1 ;;
        --learner) learner=1 ;;
        --shard)
            [ $# -gt 0 ] || fail "--shard wants the name of a shard"
            add_shard "$1"
            shift
            ;;
        --no-start) start= ;;
        --help | -h)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        -*) fail "unknown option $argument: see --help" ;;
        *.whl) program=$argument ;;
        *) fail "$argument is no wheel: name a file that ends with .whl, or none" ;;
    esac
done
if [ -z "$root" ]; then
    [ -d /run/systemd/system ] || fail "systemd does not run here: deploy/README.md has other ways (By hand, Containers)"
    [ "$(id -u)" = 0 ] || fail "run it as root, or with DESTDIR=DIRECTORY"
fi
[ ! -e "$units/dynamix-nats.service.d/tls.conf" ] || tls=1
[ ! -e "$units/dynamix-collector.service.d/ebpf.conf" ] || ebpf=1
[ ! -e "$units/dynamix-learner.service" ] || learner=1
for enabled in "$units"/multi-user.target.wants/dynamix-collector@*.service; do
    enabled=${enabled##*@}
    [ "$enabled" = "*.service" ] || add_shard "${enabled%.service}"
done
[ ! -e "$units/dynamix-collector.service" ] || [ -e "$units/dynamix-nats.service" ] || node=1
[ -z "$node" ] || [ -z "$tls$learner" ] || fail "--tls and --learner are for the broker's machine, not for --node"
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
    else
        install -m 644 "$1" "$target.new"
        echo "kept $target, which was edited; the new one is $target.new"
    fi
    install -m 644 "$1" "$pristine"
}

# The program. With DESTDIR it is made where it shall not stay: its scripts get the path that they will have.
[ -x "$root$prefix/bin/python" ] || "$python" -m venv "$root$prefix"
"$root$prefix/bin/python" -m pip install --quiet --disable-pip-version-check -c "$source/constraints.txt" \
    "$program[cli${learner:+,learn}]"
if [ -n "$root" ]; then
    grep -rlIF "$root$prefix" "$root$prefix/bin" "$root$prefix/pyvenv.cfg" | while read -r file; do
        sed -i "s|$root$prefix|$prefix|g" "$file"
    done
fi

install -d -m 755 "$root/etc/dynamix" "$root/etc/dynamix/train" "$share/installed" "$root$prefix/share/doc/dynamix"
install -m 644 "$deploy/README.md" "$root$prefix/share/doc/dynamix/"
install -m 755 "$deploy/uninstall.sh" "$share/"
install_configuration "$deploy/systemd/dynamix.env"
if [ -z "$node" ]; then
    install_configuration "$deploy/nats.conf"
    [ -z "$tls" ] || install_configuration "$deploy/nats-tls.conf"
    # Users that `dynamix keys` made stay, and get the permissions of this version.
    users=$root/etc/dynamix/users/users.conf
    if [ ! -e "$users" ]; then
        install -d -m 755 "$root/etc/dynamix/users"
        install -m 644 "$deploy/users/users.conf" "$deploy/users/users-accounts.conf" "$root/etc/dynamix/users/"
    elif ! cmp -s "$deploy/users/users.conf" "$users" || [ ! -e "${users%.conf}-accounts.conf" ]; then
        "$root$prefix/bin/python" -m dynamix.cli.main keys refresh --users "$users"
    fi
    for users in "$root"/etc/dynamix/users/shard-*.conf; do
        case $users in *-accounts.conf) continue ;; esac
        [ ! -e "$users" ] || "$root$prefix/bin/python" -m dynamix.cli.main keys refresh --users "$users"
    done
    sh "$deploy/make-secrets.sh" "$root/etc/dynamix/credentials"
else
    (umask 077 && mkdir -p "$root/etc/dynamix/credentials")
fi

services="dynamix-collector"
[ -n "$node" ] || services="$services dynamix-reward dynamix-arbitrator"
[ -z "$learner" ] || services="$services dynamix-learner"
broker=
[ -n "$node" ] || broker="dynamix-nats dynamix-provision"
install -d -m 755 "$units"
for unit in $broker $services dynamix-train@; do
    install -m 644 "$deploy/systemd/$unit.service" "$units/"
done
[ -z "$ebpf" ] || install -D -m 644 "$deploy/systemd/dynamix-collector.service.d/ebpf.conf" \
    -t "$units/dynamix-collector.service.d"
[ -z "$tls" ] || install -D -m 644 "$deploy/systemd/dynamix-nats.service.d/tls.conf" -t "$units/dynamix-nats.service.d"

# The same units as templates, an instance of each for a shard.
sharded="dynamix-collector"
[ -n "$node" ] || sharded="dynamix-provision dynamix-reward dynamix-arbitrator dynamix-collector"
if [ -n "$shards" ]; then
    install -d -m 755 "$root/etc/dynamix/shards"
    for unit in $sharded ${learner:+dynamix-learner}; do
        install -m 644 "$deploy/systemd/$unit.service" "$units/$unit@.service"
        install -D -m 644 "$deploy/systemd/shard.conf" -t "$units/$unit@.service.d"
    done
    [ -z "$ebpf" ] || install -D -m 644 "$deploy/systemd/dynamix-collector.service.d/ebpf.conf" \
        -t "$units/dynamix-collector@.service.d"
fi

# What only the operator has, and without which nothing can start.
has() {
    [ -s "$root/etc/dynamix/$1" ]
}
wanting=
if [ -n "$node" ] && ! has credentials/collector.password && ! has credentials/collector.nkey; then
    if [ -n "$shards" ]; then
        services= # only shards train here
    else
        wanting="copy collector.password and trainer.password from the broker's /etc/dynamix/credentials to here, name
the broker in /etc/dynamix/dynamix.env, and: systemctl start dynamix-collector"
    fi
elif [ -n "$tls" ] && ! { has tls/certificate.pem && has tls/key.pem; }; then
    wanting="put the broker's certificate and key into /etc/dynamix/tls/certificate.pem and key.pem, and run this again"
elif [ -n "$tls" ] && ! grep -q '^DYNAMIX_NATS_URL=tls://' "$root/etc/dynamix/dynamix.env"; then
    wanting="name the broker in /etc/dynamix/dynamix.env as its certificate does (DYNAMIX_NATS_URL=tls://NAME:4222, and
DYNAMIX_NATS_CA_FILE) for the services of this machine, too, and run this again"
fi
[ -z "$wanting" ] || echo "nothing is started yet: $wanting"
instances=
for shard in $shards; do
    missing=
    for unit in $sharded; do
        key=credentials/$shard-${unit#dynamix-}.nkey
        has "$key" || missing="$missing /etc/dynamix/$key"
    done
    if [ -z "$missing" ]; then
        for unit in $sharded; do
            instances="$instances $unit@$shard"
        done
        if [ -n "$learner" ] && has "credentials/$shard-learner.nkey"; then
            instances="$instances dynamix-learner@$shard"
        fi
    else
        echo "shard $shard is not started yet: make its keys (README.md, Shards) and run this again with" \
            "--shard $shard; missing:$missing"
    fi
done

[ -n "$broker$services$instances" ] || exit 0
# shellcheck disable=SC2086 # names of units, one word each
if [ -n "$root" ]; then
    if command -v systemctl >/dev/null; then
        systemctl --quiet --root="$root" enable $broker $services $instances
    else
        echo "no systemctl here: enable on the machine itself:" $broker $services $instances
    fi
    exit 0
fi
systemctl daemon-reload
# shellcheck disable=SC2086
systemctl --quiet enable $broker $services $instances
{ [ -n "$start" ] && [ -z "$wanting" ]; } || exit 0
if [ -n "$broker" ]; then
    systemctl start dynamix-nats
    for _ in 1 2; do # it may run with the permissions of before; accounts new to it work from the second reload on
        systemctl reload dynamix-nats
        sleep 1
    done
    systemctl restart dynamix-provision # brings the streams up to date
fi
# shellcheck disable=SC2086
systemctl restart $services $instances # returns once they are ready
# shellcheck disable=SC2086
echo "running:" $broker $services $instances
