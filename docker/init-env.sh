#!/bin/sh
# Random secrets for compose.yaml, once; there are no defaults.
set -eu
file=$(dirname "$0")/.env
if [ -e "$file" ]; then
    echo "$file exists; it is left as it is." >&2
    exit 0
fi
umask 077
random() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }
{
    echo "POSTGRES_PASSWORD=$(random)"
    echo "VALKEY_PASSWORD=$(random)"
    echo "SLUICE_SECRET_KEY=$(random)"
    echo "SLUICE_KEY_PEPPER=$(random)"
    echo "SLUICE_ALLOWED_HOSTS=localhost,127.0.0.1"
} >"$file"
echo "wrote $file" >&2
