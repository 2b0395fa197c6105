#!/bin/sh
# Write the broker's streams (its store directory $1) into the file $2, a gzipped tar, and its SHA-256 beside it. The
# broker must be stopped: of a running one a copy is not whole. As root, or as the owner of the store.
#
#   sh deploy/backup-store.sh /var/lib/dynamix-nats /var/backups/dynamix-nats.tar.gz
set -eu
fail() {
    echo "backup-store.sh: $1" >&2
    exit 2
}
[ $# -eq 2 ] || fail "usage: backup-store.sh STORE FILE"
store=$(realpath -- "$1" 2>/dev/null) && [ -d "$store/jetstream" ] ||
    fail "$1 is no store of nats-server: it has no directory jetstream"
file=$2
[ ! -e "$file" ] || fail "$file exists: choose another name, or move it away"
case $(realpath -m -- "$file") in
"$store"/*) fail "$file is inside of the store: choose another place" ;;
esac
if find /proc/[0-9]*/fd -lname "$store/*" 2>/dev/null | grep -q .; then
    fail "a process has files of $store open: stop the broker first"
fi
umask 077
trap 'rm -f -- "$file.partial" "$file.begun"' EXIT
touch -- "$file.begun"
tar -C "$store" -czf "$file.partial" jetstream
tar -tzf "$file.partial" >/dev/null
[ -z "$(find "$store" -newer "$file.begun" -print -quit)" ] || fail "the store changed meanwhile: stop the broker first"
sync "$file.partial"
mv -- "$file.partial" "$file"
(cd "$(dirname -- "$file")" && sha256sum -- "$(basename -- "$file")") >"$file.sha256"
echo "wrote $file, $(wc -c <"$file") bytes, and $file.sha256"
