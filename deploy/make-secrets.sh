#!/bin/sh
# Make the certificates and keys of a deployment in DIRECTORY; what is there stays. install.sh and up.sh run it; by hand:
#
#   sh deploy/make-secrets.sh [--owner UID] DIRECTORY [HOST ...]
#
#   authority/         authority.json and ca.key: whoever has them can make keys and certificates; copied to no other machine
#   accounts.conf      the broker's accounts and their public keys; not secret
#   credentials/       one key per service: provision, arbitrator, reward, learner, watcher, and this node's collector
#   ca.pem             the certificate of our authority, for every client; not secret
#   tls/               certificate.pem and key.pem of the broker
#
# The certificate is for this host's names, localhost, 127.0.0.1, each HOST (a name or an address) and what it was for
# before. It is made again when a HOST is missing in it or less than 30 days are left; without authority/ca.key it stays.
# --owner gives credentials and the broker's key to a container's user (as root). DYNAMIX names the command, else it is
# `dynamix` or, by docker or podman (ENGINE), the image dynamix-cli. The collector's key is for the node DYNAMIX_NODE, else
# this one.
set -eu
umask 077
fail() {
    echo "make-secrets.sh: $1" >&2
    exit 2
}
owner=
if [ "${1:-}" = --owner ]; then
    owner=${2:-}
    [ "$(id -u)" = 0 ] || fail "--owner needs root: run it with sudo"
    shift 2 || fail "--owner needs a UID"
fi
case ${1:-} in '' | -*) fail "usage: make-secrets.sh [--owner UID] DIRECTORY [HOST ...]" ;; esac
directory=$1
shift
command -v openssl >/dev/null || fail "openssl is missing: apt-get install openssl"
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
cd "$directory"
mkdir -p authority credentials tls

own=$(hostname)
set -- "$own" "$(hostname -f 2>/dev/null || echo "$own")" localhost 127.0.0.1 "$@"
before=
if [ -s tls/certificate.pem ]; then
    before=$(openssl x509 -in tls/certificate.pem -noout -ext subjectAltName |
        tr ',' '\n' | sed -n 's/^ *DNS://p; s/^ *IP Address://p')
fi
names=
for host in "$@" $before; do
    case $host in
    '' | -* | *[!A-Za-z0-9.:*-]*) fail "'$host' is not a host name or an address" ;;
    *:* | *[0-9].[0-9]*.[0-9]*.[0-9]*) kind=IP ;;
    *) kind=DNS ;;
    esac
    case ",$names," in *",$kind:$host,"*) ;; *) names="$names${names:+,}$kind:$host" ;; esac
done

# Whether the certificate has all names, and is good for 30 days more.
is_current() {
    [ -s tls/certificate.pem ] && [ -s tls/key.pem ] || return 1
    openssl x509 -in tls/certificate.pem -noout -checkend 2592000 >/dev/null || return 1
    for host in "$@"; do
        case $host in *:* | *[0-9].[0-9]*.[0-9]*.[0-9]*) option=-checkip ;; *) option=-checkhost ;; esac
        openssl x509 -in tls/certificate.pem -noout "$option" "$host" | grep -q 'does match' || return 1
    done
}
key="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
# shellcheck disable=SC2086 # options, one word each
if [ ! -s authority/ca.key ] && [ -s tls/certificate.pem ]; then
    [ -s ca.pem ] || fail "tls/certificate.pem is yours: put the certificate of its authority into $directory/ca.pem"
    is_current "$@" || echo "tls/certificate.pem ends within 30 days, or lacks one of: $names" >&2
elif ! is_current "$@"; then
    if [ ! -s authority/ca.key ]; then
        openssl req -x509 $key -days 3650 -subj '/CN=DYNAMIX' -keyout authority/ca.key -out ca.pem 2>/dev/null
    fi
    openssl req $key -subj "/CN=$own" -addext "subjectAltName=$names" -keyout tls/key.new -out tls/request 2>/dev/null
    openssl x509 -req -in tls/request -days 365 -copy_extensions copy -CA ca.pem -CAkey authority/ca.key \
        -set_serial "0x$(openssl rand -hex 16)" -out tls/certificate.new 2>/dev/null
    mv tls/key.new tls/key.pem
    mv tls/certificate.new tls/certificate.pem
    rm tls/request
    echo "made tls/certificate.pem for $names"
fi

# `dynamix keys`, here or in a container that has no network and no other folder.
keys() {
    if [ -n "${DYNAMIX:-}" ]; then
        $DYNAMIX keys "$@"
    elif command -v dynamix >/dev/null; then
        dynamix keys "$@"
    else
        engine=${ENGINE:-$(command -v docker || command -v podman)} ||
            fail "neither dynamix nor docker nor podman is here: name a command with DYNAMIX=..."
        $engine run --rm --network none --cap-drop all --hostname "$own" --user "$(id -u):$(id -g)" --workdir "$directory" \
            --volume "$directory:$directory" "${CLI_IMAGE:-dynamix-cli:0.1.0}" keys "$@"
    fi
}
if [ ! -e accounts.conf ]; then
    keys init --authority authority/authority.json --credentials credentials ${DYNAMIX_NODE:+--node "$DYNAMIX_NODE"}
    mv credentials/collector-*.creds credentials/collector.creds
fi
chmod 755 "$directory"
chmod 644 ca.pem accounts.conf
[ -z "$owner" ] || chown "$owner" credentials/*.creds tls/*.pem
