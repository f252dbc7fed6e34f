#!/usr/bin/env bash
# Run the SuperLink with TLS, for registered SuperNodes only, and with its data in a database file. Runs start only
# while superexec.sh is running on the same machine.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $# -gt 0 ]]; then
  cat <<'TEXT'
usage: superlink.sh        settings are environment variables, for example from systemd's EnvironmentFile:

FEDKACE_CERTIFICATES   folder of ca.crt, superlink.crt, superlink.key and superexec.secret
FEDKACE_DATABASE       file in which the SuperLink keeps nodes, runs and messages across restarts
FEDKACE_SIGNATURES     folder of apps' signatures (sign-app.py), which SuperNodes check; empty: none
FEDKACE_HOST           address to listen on, by default 127.0.0.1; 0.0.0.0 for all addresses
FEDKACE_PORT           port to listen on, by default 9092
TEXT
  [[ $1 == -h || $1 == --help ]] && exit
  exit 2
fi

needs_setting FEDKACE_CERTIFICATES "name the folder of ca.crt, superlink.crt, superlink.key and superexec.secret"
needs_setting FEDKACE_DATABASE "name the SuperLink's database file"
certificates=$FEDKACE_CERTIFICATES
database=$FEDKACE_DATABASE
host=${FEDKACE_HOST:-127.0.0.1} port=${FEDKACE_PORT:-9092}
need_flower flower-superlink
need_openssl
whole FEDKACE_PORT "$port" 1 65535
valid_certificate "$certificates/ca.crt" "the authority's certificate"
valid_certificate "$certificates/superlink.crt" "the SuperLink's certificate"
private "$certificates/superlink.key" "the SuperLink's key"
private "$certificates/superexec.secret" "the secret shared by SuperLink and SuperExec"
openssl verify -CAfile "$certificates/ca.crt" "$certificates/superlink.crt" >/dev/null 2>&1 \
  || die "$certificates/superlink.crt is not signed by $certificates/ca.crt"
[[ -d $(dirname "$database") ]] || die "FEDKACE_DATABASE = $database: its folder does not exist"
if [[ -n ${FEDKACE_SIGNATURES:-} ]]; then
  [[ -d $FEDKACE_SIGNATURES && -r $FEDKACE_SIGNATURES ]] \
    || die "FEDKACE_SIGNATURES = $FEDKACE_SIGNATURES: is not a folder that $(id -un) can read"
fi
free_port "$host" "$port" FEDKACE_PORT
quiet_flower
exec python3 "$(dirname "${BASH_SOURCE[0]}")/superlink.py" --host "$host" --port "$port" \
  --ssl-ca-certfile "$certificates/ca.crt" --ssl-certfile "$certificates/superlink.crt" \
  --ssl-keyfile "$certificates/superlink.key" --enable-supernode-auth \
  --isolation process --superexec-auth-secret-file "$certificates/superexec.secret" --database "$database" \
  --disable-runtime-dependency-installation
