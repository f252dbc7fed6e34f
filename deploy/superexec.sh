#!/usr/bin/env bash
# Run the SuperExec, the process that starts the server's part of a run, on the SuperLink's machine. As a separate
# process it can be restarted alone. It authenticates itself to the SuperLink with a secret.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $# -gt 0 ]]; then
  echo 'usage: superexec.sh        on the same machine and with the same settings as superlink.sh; see also register.sh'
  [[ $1 == -h || $1 == --help ]] && exit
  exit 2
fi

needs_setting FEDKACE_CERTIFICATES "name the folder of ca.crt and superexec.secret"
certificates=$FEDKACE_CERTIFICATES port=${FEDKACE_PORT:-9092}
need_flower flower-superexec
whole FEDKACE_PORT "$port" 1 65535
valid_certificate "$certificates/ca.crt" "the authority's certificate"
private "$certificates/superexec.secret" "the secret shared by SuperLink and SuperExec"
quiet_flower
export FEDKACE_NODES=$nodes_file  # for the ServerApp
exec flower-superexec --runtime-api-address "127.0.0.1:$port" --root-certificates "$certificates/ca.crt" \
  --superexec-auth-secret-file "$certificates/superexec.secret"
