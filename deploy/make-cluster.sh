#!/bin/sh
# Write what the three servers of nats-cluster.conf must know of each other into the directory $1: one file of
# environment variables each, cluster-1.env to cluster-3.env. Give the file of its number to each server, as cluster.env.
#
#   sh deploy/make-cluster.sh deploy/secrets broker-a.example broker-b.example broker-c.example     (host[:6222] each)
set -eu
if [ $# -ne 4 ]; then
    echo "usage: make-cluster.sh DIRECTORY HOST[:PORT] HOST[:PORT] HOST[:PORT], a directory and three servers" >&2
    exit 2
fi
directory=$1
shift
mkdir -p "$directory"
routes="" urls="" number=0
for server in "$@"; do
    number=$((number + 1))
    case $server in
    *[!A-Za-z0-9.:-]* | "" | :*)
        echo "make-cluster.sh: '$server' is not a HOST or HOST:PORT" >&2
        exit 2
        ;;
    *:*) address=$server ;;
    *) address=$server:6222 ;;
    esac
    routes="${routes}NATS_ROUTE_$number=nats-route://$address
"
    urls="$urls${urls:+,}tls://${address%:*}:4222"
done
for number in 1 2 3; do
    {
        printf 'NATS_SERVER_NAME=dynamix-%s\n%s' "$number" "$routes"
    } >"$directory/cluster-$number.env"
done
echo "for every service and job: DYNAMIX_NATS_URL=$urls"
