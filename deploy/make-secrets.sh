#!/bin/sh
# Write one password per user of users/users.conf into the directory $1; what is there already stays, so that a second
# run changes nothing. To rotate a password delete its file, run this again, restart the broker, then the service. Keys,
# which need no restart and can be for one job or one node only: `dynamix keys --help`.
#
#   <user>.password   for the service (DYNAMIX_NATS_PASSWORD_FILE)
#   nats.env          all of them, for the broker
#
# Only its owner can open the directory. Inside it the password files are readable, because a container mounts
# just the one it needs and reads it as a user of its own.
set -eu
directory=${1:?usage: make-secrets.sh DIRECTORY}
users="collector reward arbitrator learner trainer provision watcher"
umask 077
mkdir -p "$directory"
chmod 700 "$directory"
lines=""
for user in $users; do
    file=$directory/$user.password
    if [ ! -s "$file" ]; then
        # The letter in front keeps the server from reading a number.
        printf 'p%s\n' "$(od -An -N 24 -tx1 /dev/urandom | tr -d ' \n')" >"$file"
        chmod 644 "$file"
    fi
    key=$(printf %s "$user" | tr '[:lower:]' '[:upper:]')
    lines="${lines}NATS_PASSWORD_$key=$(cat "$file")
"
done
printf %s "$lines" >"$directory/nats.env"
