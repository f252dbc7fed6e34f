#!/usr/bin/env bash
# Run a whole federation on one machine: a SuperLink with TLS and node authentication, and N SuperNodes with keys.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: federation.sh setup FOLDER [--nodes N] [--port P] [--connection NAME] [--inboxes] [--node-config TEXT]
       federation.sh start FOLDER [NAME...]
       federation.sh stop FOLDER [NAME...]
       federation.sh status FOLDER

setup   creates certificates, keys and settings in FOLDER, which must be new or empty: in FOLDER/certificates, FOLDER/superlink and FOLDER/node-1 to node-N,
        and an entry NAME (default fedkace) in Flower's config.toml. N is 4 and P is 9092 by default. The nodes use
        the N ports after P; P = 0 chooses ports that are free now. With --inboxes each node learns from the files
        in FOLDER/node-K/inbox. TEXT is added to every node's --node-config.
start   starts the members that are not running, registers the nodes, and waits until every node is connected.
        NAME is superlink, superexec, node-1, ...; by default all.
stop    stops the members and waits for their child processes. No other process is affected.
status  prints one line per member; the exit code is 0 if all are running.

Logs are in FOLDER/*/log. Another start continues with the same keys, state and database.
TEXT
}

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
start_seconds=${FEDKACE_START_SECONDS:-180} stop_seconds=60

setup() {
  local nodes=4 port=9092 connection=fedkace inboxes='' more='' ports number
  while [[ $# -gt 0 ]]; do
    case $1 in
      --nodes) needs_value "$@" && nodes=$2 && shift ;;
      --port) needs_value "$@" && port=$2 && shift ;;
      --connection) needs_value "$@" && connection=$2 && shift ;;
      --inboxes) inboxes=yes ;;
      --node-config) needs_value "$@" && more=$2 && shift ;;
      *) die "$1: unknown option; see federation.sh --help" ;;
    esac
    shift
  done
  whole --nodes "$nodes" 1 1000
  whole --port "$port" 0 $((65535 - nodes))
  [[ $more != *\'* && $more != *$'\n'* ]] || die "--node-config $more: must not contain single quotes or line breaks"
  [[ $connection =~ ^[A-Za-z0-9_-]{1,64}$ ]] \
    || die "--connection = '$connection': must be 1 to 64 letters, digits, dashes or underscores"
  [[ ! -e $folder/settings ]] || die "$folder is already set up; start it, or choose another folder"
  [[ -e $folder/.fedkace || ! -e $folder || (-d $folder && -z $(ls -A "$folder")) ]] \
    || die "$folder holds files that no setup has written; choose a new or an empty folder"
  need_flower flwr
  need python3 "activate the environment that contains Flower"
  read -ra ports <<<"$(ports_for "$port" "$nodes")"
  free_connection "$connection" "127.0.0.1:${ports[0]}" "$folder/certificates/ca.crt"
  mkdir -p "$folder"
  echo '{"holds": "a federation", "files": {}}' >"$folder/.fedkace"
  [[ -e $folder/certificates/ca.key ]] || "$scripts/certificates.sh" ca "$folder/certificates" >/dev/null
  [[ -e $folder/certificates/superlink.key ]] \
    || "$scripts/certificates.sh" superlink "$folder/certificates" localhost >/dev/null
  mkdir -p "$folder/superlink" "$folder/superexec"
  write "$folder/superlink/env" "FEDKACE_CERTIFICATES=$folder/certificates" FEDKACE_HOST=127.0.0.1 \
    "FEDKACE_PORT=${ports[0]}" "FEDKACE_DATABASE=$folder/superlink/state.db"
  write "$folder/superexec/env" "FEDKACE_CERTIFICATES=$folder/certificates" "FEDKACE_PORT=${ports[0]}"
  for ((number = 1; number <= nodes; number++)); do
    mkdir -p "$folder/node-$number${inboxes:+/inbox/new}"
    [[ -e $folder/node-$number/key ]] || "$scripts/node-key.sh" "$folder/node-$number/key" "node-$number" >/dev/null
    write "$folder/node-$number/env" "FEDKACE_SUPERLINK=127.0.0.1:${ports[0]}" \
      "FEDKACE_CA=$folder/certificates/ca.crt" "FEDKACE_KEY=$folder/node-$number/key" "FEDKACE_NODE=node-$number" \
      "FEDKACE_PARTITION=$((number - 1))" "FEDKACE_PARTITIONS=$nodes" "FEDKACE_STATE=$folder/node-$number/state" \
      "FEDKACE_INBOX=${inboxes:+$folder/node-$number/inbox}" "FEDKACE_NODE_CONFIG=$more" \
      "FEDKACE_RUNTIME_PORT=${ports[number]}"
  done
  "$scripts/connection.sh" "$connection" "127.0.0.1:${ports[0]}" "$folder/certificates/ca.crt"
  write "$folder/settings" "connection=$connection" "nodes=$nodes"
  echo "$folder: $nodes nodes are set up; start them with federation.sh start $folder"
}

# free_connection NAME HOST:PORT CA_CERTIFICATE: fail if Flower's config.toml has another entry of that name.
free_connection() {
  local home said
  flower_home
  local file=$home/config.toml
  if [[ ! -e $file ]]; then return; fi
  said=$(python3 - "$file" "$@" <<'PYTHON'
import sys, tomllib
from pathlib import Path

file, name, address, certificate = sys.argv[1:]
try:
    entry = tomllib.loads(Path(file).read_text(encoding="utf-8")).get("superlink", {}).get(name)
except tomllib.TOMLDecodeError as error:
    print(f"{file} is not valid TOML: {error}")
else:
    if entry not in (None, {"address": address, "root-certificates": certificate}):
        taken = f"--connection {name}: {file} already has superlink.{name} ({entry.get('address')})"
        print(f"{taken}; choose another name with --connection NAME, or remove that entry")
PYTHON
  )
  [[ -z $said ]] || die "$said"
}

# Print the SuperLink's port, then one port per node.
ports_for() {
  if [[ $1 -ne 0 ]]; then
    seq -s ' ' "$1" $(($1 + $2))
    return
  fi
  python3 - "$2" <<'PYTHON'
import contextlib, random, socket, sys

# Outgoing connections get their local ports from 32768 upwards and might take one from there before its server starts.
choice = range(20000, 32768)
wanted, free = int(sys.argv[1]) + 1, []
for port in random.SystemRandom().sample(choice, len(choice)):
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        free.append(port)
    if len(free) == wanted:
        break
else:
    sys.exit(f"error: only {len(free)} of {wanted} ports from {choice.start} to {choice.stop - 1} are free")
print(*free)
PYTHON
}

# write FILE NAME=VALUE...: write settings in a form that both bash and systemd's EnvironmentFile can read.
write() {
  local file=$1 pair
  shift
  for pair; do printf "%s='%s'\n" "${pair%%=*}" "${pair#*=}"; done >"$file.new"
  mv "$file.new" "$file"
}

read_settings() {
  readable "$folder/settings" "the federation's settings; create them with federation.sh setup $folder"
  # shellcheck source=/dev/null
  source "$folder/settings"
  members=(superlink superexec)
  local number
  # shellcheck disable=SC2154  # nodes and connection come from the file
  for ((number = 1; number <= nodes; number++)); do members+=("node-$number"); done
}

# chosen NAME...: keep only the named members, or all if there are no names.
chosen() {
  local name
  for name; do [[ " ${members[*]} " == *" $name "* ]] || die "$name is not a member of $folder; its members are ${members[*]}"; done
  if [[ $# -gt 0 ]]; then members=("$@"); fi
}

# Every process started here has its member's folder in its environment, which its children inherit. This identifies
# them reliably, even if they have left the process group or their parent has ended.
processes_of() {
  local environment
  for environment in /proc/[0-9]*/environ; do
    if grep -qzxF "FEDKACE_MEMBER=$folder/$1" "$environment" 2>/dev/null; then
      environment=${environment%/environ}
      echo "${environment#/proc/}"
    fi
  done
}

# The member itself, unlike its children, has the process id that was saved at its start.
running() {
  local number
  number=$(cat "$folder/$1/pid" 2>/dev/null) && grep -qzxF "FEDKACE_MEMBER=$folder/$1" "/proc/$number/environ" 2>/dev/null
}

begin() {
  local script=supernode.sh
  if [[ $1 == super* ]]; then script=$1.sh; fi
  (
    set -a
    # shellcheck source=/dev/null
    source "$folder/$1/env"
    export FEDKACE_MEMBER=$folder/$1
    cd "$folder/$1"
    exec setsid "$scripts/$script" >>log 2>&1 </dev/null
  ) &
  echo $! >"$folder/$1/pid"
}

# Print what a member has written to its log since its last start.
latest() {
  tail -c "+$((${began[$1]} + 1))" "$folder/$1/log" 2>/dev/null | sed 's/\x1b\[[0-9;]*m//g' || true
}

# why NAME: print one line on why a member ended.
why() {
  local text
  text=$(latest "$1")
  case $text in
    *'error: '*) grep -m1 -o 'error: .*' <<<"$text" | cut -c8- ;;
    *'code: 2001'*) echo "the SuperLink accepts only nodes with a key (FEDKACE_KEY)" ;;
    *'code: 2004'*) echo "its key is not registered, or the SuperLink still counts an earlier process as online, for up to a minute" ;;
    *CERTIFICATE_VERIFY_FAILED*) echo "the SuperLink's certificate cannot be verified with FEDKACE_CA: $(grep -m1 -o 'certificate verify failed: [^(]*' <<<"$text")" ;;
    *'address already in use'*) echo "its port is already in use" ;;
    *) tail -n 1 <<<"$text" ;;
  esac
}

# until_ready NAME TEXT: wait until a text appears in a member's log; fail if the member ends first.
until_ready() {
  local end=$((SECONDS + start_seconds))
  until grep -q "$2" <<<"$(latest "$1")"; do
    kill -0 "$(cat "$folder/$1/pid")" 2>/dev/null || die "$1 ended: $(why "$1") (log: $folder/$1/log)"
    [[ $SECONDS -lt $end ]] || die "$1 is not ready after $start_seconds seconds: $(why "$1") (log: $folder/$1/log)"
    sleep 0.3
  done
}

start() {
  local name new=()
  declare -gA began
  need_flower flower-superlink
  need_flower flower-supernode
  chosen "$@"
  for name in "${members[@]}"; do
    if running "$name"; then
      echo "$name: already running"
    else
      [[ -z $(processes_of "$name") ]] || wait_for_end "$name"
      began[$name]=$(stat -c %s "$folder/$name/log" 2>/dev/null || echo 0)
      new+=("$name")
    fi
  done
  for name in ${new[@]+"${new[@]}"}; do
    if [[ $name == node-* ]]; then
      [[ -n ${registered:-} ]] || register "${new[@]}"
      registered=yes
    fi
    begin "$name"
    if [[ $name == superlink ]]; then until_ready superlink 'Uvicorn running'; fi
  done
  for name in ${new[@]+"${new[@]}"}; do
    case $name in
      superexec) until_ready superexec 'Starting Flower SuperExec' ;;
      node-*) until_ready "$name" 'SuperNode ID' ;;
    esac
    echo "$name: started"
  done
}

register() {
  local name keys=()
  running superlink || die "the SuperLink is not running; start it with federation.sh start $folder superlink"
  for name; do if [[ $name == node-* ]]; then keys+=("$folder/$name/key.pub"); fi; done
  "$scripts/register.sh" "$connection" "${keys[@]}" >/dev/null
}

stop() {
  local name nodes=() servers=()
  chosen "$@"
  for name in "${members[@]}"; do
    if [[ $name == node-* ]]; then nodes+=("$name"); else servers=("$name" ${servers[@]+"${servers[@]}"}); fi
  done
  # Stop the nodes first, so that they can sign off from the SuperLink and reconnect at once. Stop the SuperLink last.
  end ${nodes[@]+"${nodes[@]}"}
  for name in ${servers[@]+"${servers[@]}"}; do end "$name"; done
}

end() {
  local name
  for name; do
    if running "$name"; then kill -TERM "$(cat "$folder/$name/pid")" 2>/dev/null || true; fi
  done
  for name; do
    wait_for_end "$name"
    rm -f "$folder/$name/pid"
    echo "$name: stopped"
  done
}

# A member's child processes end by themselves after it; kill those that do not.
wait_for_end() {
  local end=$((SECONDS + stop_seconds)) left
  while left=$(processes_of "$1") && [[ -n $left ]]; do
    if [[ $SECONDS -ge $end ]]; then
      echo "$1: killing the processes left after $stop_seconds seconds: $(tr '\n' ' ' <<<"$left")" >&2
      xargs kill -KILL <<<"$left" 2>/dev/null || true
    fi
    sleep 0.2
  done
}

status() {
  local name code=0
  for name in "${members[@]}"; do
    if running "$name"; then
      echo "$name: running, process $(cat "$folder/$name/pid")"
    else
      echo "$name: not running"
      code=1
    fi
  done
  return $code
}

case ${1:-} in
  setup | start | stop | status) ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac
[[ $# -ge 2 && $2 != -* ]] || die "$1: give the federation's folder"
task=$1 folder=$(realpath -m "$2")
[[ $folder != *\'* && $folder != *[[:space:]]* ]] || die "'$folder': must not contain spaces or quotes"
unquoted FOLDER "$folder"
shift 2
if [[ $task != setup ]]; then read_settings; fi
"$task" "$@"
