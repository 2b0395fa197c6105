#!/bin/sh
# Put the streams of a file $1, which backup-store.sh wrote, into the store directory $2 of a broker that does not run
# and has no streams yet. As root, or as the owner of the store.
#
#   sh deploy/restore-store.sh /var/backups/dynamix-nats.tar.gz /var/lib/dynamix-nats
set -eu
fail() {
    echo "restore-store.sh: $1" >&2
    exit 2
}
[ $# -eq 2 ] || fail "usage: restore-store.sh FILE STORE"
file=$1
[ -f "$file" ] || fail "$file is no file"
[ -f "$file.sha256" ] || fail "$file.sha256 is missing: it lies beside what backup-store.sh wrote"
[ "$(sha256sum <"$file" | cut -d' ' -f1)" = "$(cut -d' ' -f1 <"$file.sha256")" ] ||
    fail "$file is not as it was written: its SHA-256 differs from $file.sha256"
umask 077
mkdir -p -- "$2"
store=$(realpath -- "$2")
if find /proc/[0-9]*/fd -lname "$store/*" 2>/dev/null | grep -q .; then
    fail "a process has files of $store open: stop the broker first"
fi
[ ! -e "$store/jetstream" ] || fail "$store has streams already: move $store/jetstream away first"
rm -rf -- "$store/restoring"
mkdir -- "$store/restoring"
tar -C "$store/restoring" --no-same-owner -xzf "$file"
chown -R --reference="$store" "$store/restoring" 2>/dev/null || true # as root: to the store's owner
sync "$store"
mv -- "$store/restoring/jetstream" "$store/jetstream"
rmdir -- "$store/restoring"
echo "restored $file into $store"
