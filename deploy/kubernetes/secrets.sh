#!/bin/sh
# Makes the master's certificate and the token:  deploy/kubernetes/secrets.sh NAMESPACE [DIR]
# The authority signs this one certificate, and its key is thrown away. Run again, all are new.
set -eu
namespace=${1:?"usage: secrets.sh NAMESPACE [DIR]"}
folder=${2:-$(dirname "$0")/master/secrets}
umask 077
mkdir -p "$folder"
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -days 825 \
    -subj "/CN=edl-master authority" -keyout "$made/ca.key" -out "$made/ca.crt" 2>"$made/log" || { cat "$made/log" >&2; exit 1; }
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 \
    -subj "/CN=edl-master" -keyout "$made/tls.key" -out "$made/tls.csr" 2>"$made/log" || { cat "$made/log" >&2; exit 1; }
names="DNS:edl-master,DNS:edl-master.$namespace,DNS:edl-master.$namespace.svc"
names="$names,DNS:edl-master.$namespace.svc.cluster.local,DNS:localhost,IP:127.0.0.1"
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\nbasicConstraints=CA:FALSE\n' "$names" >"$made/extensions"
openssl x509 -req -sha256 -days 825 -in "$made/tls.csr" -CA "$made/ca.crt" -CAkey "$made/ca.key" -CAcreateserial \
    -extfile "$made/extensions" -out "$made/tls.crt" 2>"$made/log" || { cat "$made/log" >&2; exit 1; }
openssl rand -hex 32 >"$made/token"

for name in ca.crt tls.crt tls.key token; do mv -f "$made/$name" "$folder/$name"; done
echo "$folder: ca.crt tls.crt tls.key token"
