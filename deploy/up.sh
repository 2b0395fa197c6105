#!/bin/sh
# From nothing to a secured deployment in containers on this machine, or bring one up to date. As root, in a clone:
#
#   sudo sh deploy/up.sh [HOST ...]       # names and addresses of this machine that other machines use
#
# It builds the images, makes certificates and keys in deploy/secrets (make-secrets.sh), and starts compose.yaml.
# COMPOSE is the command (default: docker compose; podman-compose also works), ENGINE the container engine's.
set -eu
deploy=$(cd "$(dirname "$0")" && pwd)
compose="${COMPOSE:-docker compose} -f $deploy/compose.yaml --profile tools"
export ENGINE="${ENGINE:-docker}"
$compose build nats provision collector reward arbitrator
sh "$deploy/make-secrets.sh" --owner 10001 "$deploy/secrets" nats "$@"
$compose up --detach nats
tools="$compose run --rm --no-deps -T"
$tools provision
if [ -e "$deploy/secrets/authority/authority.json" ]; then
    $tools keys refresh # permissions of this version, consumers of new keys
fi
$compose up --detach --force-recreate collector reward arbitrator # the new images; the broker stays as it is
echo "running; status: $compose ps"
