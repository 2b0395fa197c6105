#!/bin/sh
# Take back what install.sh installed: units, program, documents. As root:
#
#   sh deploy/uninstall.sh [--purge]      # or, without a clone, sh /opt/dynamix/share/dynamix/uninstall.sh
#
#   --purge   also the configuration, the authority with all keys, the streams of the broker and what training jobs stored
#
# A second run changes nothing. Units and drop-ins of the operator's own stay. DESTDIR=DIRECTORY as in install.sh.
set -eu
root=${DESTDIR:-}
root=${root%/}
purge=
for argument in "$@"; do
    case $argument in
        --purge) purge=1 ;;
        --help | -h)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        *)
            echo "uninstall.sh: unknown argument $argument: see --help" >&2
            exit 1
            ;;
    esac
done
if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
    echo "uninstall.sh: run it as root, or with DESTDIR=DIRECTORY" >&2
    exit 1
fi
units=$root/etc/systemd/system
running= # whether there are units to stop, and a systemd to tell
[ -n "$root" ] || [ ! -d /run/systemd/system ] || running=1
disable() {
    if command -v systemctl >/dev/null; then
        if [ -n "$running" ]; then
            systemctl --quiet disable --now "$1"
        else
            systemctl --quiet --root="${root:-/}" disable "$1"
        fi
    fi
}
for service in collector reward arbitrator learner provision nats; do
    unit=dynamix-$service
    [ ! -e "$units/$unit.service" ] || disable "$unit.service"
    rm -f "$units/$unit.service"
done
if [ -n "$running" ] && [ -e "$units/dynamix-train@.service" ]; then
    systemctl stop 'dynamix-train@*'
fi
rm -f "$units/dynamix-train@.service" "$units/dynamix-collector.service.d/ebpf.conf" \
    "$units/dynamix-nats.service.d/other-machines.conf"
for directory in "$units"/dynamix-*.service.d; do
    [ ! -d "$directory" ] || rmdir --ignore-fail-on-non-empty "$directory"
done
[ -z "$running" ] || systemctl daemon-reload
rm -rf "$root/opt/dynamix"
if [ -n "$purge" ]; then
    rm -rf "$root/etc/dynamix"
    for place in lib/dynamix-nats lib/dynamix-train; do
        rm -rf "$root/var/$place" "$root/var/$(dirname "$place")/private/$(basename "$place")"
    done
elif [ -d "$root/etc/dynamix" ]; then
    echo "kept: $root/etc/dynamix and the streams in $root/var/lib/dynamix-nats; --purge removes them"
fi
