#!/usr/bin/env bash
# Run a whole federation on one machine: a SuperLink with TLS and node authentication, N SuperNodes with keys, and a run.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: federation.sh setup FOLDER [--nodes N] [--port P] [--connection NAME] [--inboxes] [--node-config TEXT]
       federation.sh add-node FOLDER
       federation.sh service FOLDER APP [RUN-CONFIG...]
       federation.sh start FOLDER [NAME...]
       federation.sh stop FOLDER [NAME...]
       federation.sh status FOLDER

setup   creates certificates, keys and settings in FOLDER, which must be new or empty: in FOLDER/certificates, FOLDER/superlink and FOLDER/node-1 to node-N,
        and an entry NAME (default fedkace) in Flower's config.toml. N is 4 and P is 9092 by default. The nodes use
        the N ports after P; P = 0 chooses ports that are free now. With --inboxes each node learns from the files
        in FOLDER/node-K/inbox. TEXT is added to every node's --node-config. Node K is client K-1 of every run.
add-node adds the next node, with the options of setup; if the federation is running, the node joins it at once.
service makes a run a member of the federation: it is submitted at every start, and again whenever it fails, until it
        is stopped on purpose (see run.sh). RUN-CONFIG is as for flwr run; by default run-name is "living" and
        results-dir FOLDER/results. If the service is running, the run goes on with the app and keys given now.
start   starts the members that are not running, registers the nodes, and waits until every node is connected. The
        SuperLink admits a node that was killed after up to a minute. A node whose key was unregistered is left out.
        NAME is superlink, superexec, node-1, ... or run; by default all. By its name, a run that was stopped on
        purpose goes on.
stop    stops the members and waits for their child processes. No other process is affected.
status  prints one line per member; the exit code is 0 if all are running that are registered.

Logs are in FOLDER/*/log, the newest 10 MB and log.1 before them. Another start continues with the same keys, state and database.
TEXT
}

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
start_seconds=${FEDKACE_START_SECONDS:-180} stop_seconds=60
log_bytes=10000000

setup() {
  local port=9092 ports number
  nodes=4 connection=fedkace inboxes='' more=''
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
  for ((number = 1; number <= nodes; number++)); do make_node "$number" "${ports[0]}" "${ports[number]}"; done
  "$scripts/connection.sh" "$connection" "127.0.0.1:${ports[0]}" "$folder/certificates/ca.crt"
  write_settings
  echo "$folder: $nodes nodes are set up; start them with federation.sh start $folder"
}

write_settings() {
  write "$folder/settings" "connection=$connection" "nodes=$nodes" "inboxes=$inboxes" "more=$more"
}

# make_node NUMBER PORT-OF-SUPERLINK PORT
make_node() {
  local home=$folder/node-$1
  mkdir -p "$home${inboxes:+/inbox/new}"
  [[ -e $home/key ]] || "$scripts/node-key.sh" "$home/key" "node-$1" >/dev/null
  write "$home/env" "FEDKACE_SUPERLINK=127.0.0.1:$2" "FEDKACE_CA=$folder/certificates/ca.crt" "FEDKACE_KEY=$home/key" \
    "FEDKACE_NODE=node-$1" "FEDKACE_STATE=$home/state" "FEDKACE_INBOX=${inboxes:+$home/inbox}" \
    "FEDKACE_NODE_CONFIG=$more" "FEDKACE_RUNTIME_PORT=$3"
}

# setting MEMBER NAME: print a value from a member's settings.
setting() {
  (
    # shellcheck source=/dev/null
    source "$folder/$1/env"
    echo "${!2}"
  )
}

add-node() {
  local port=0 number each
  [[ $# -eq 0 ]] || die "add-node: takes no options; the node gets those of setup"
  for ((number = 1; number <= nodes; number++)); do
    each=$(setting "node-$number" FEDKACE_RUNTIME_PORT)
    if [[ $each -gt $port ]]; then port=$each; fi
  done
  port=$((port + 1))
  while listening 127.0.0.1 "$port"; do port=$((port + 1)); done
  make_node "$number" "$(setting superlink FEDKACE_PORT)" "$port"
  nodes=$number members+=("node-$number")
  write_settings
  if running superlink; then
    start "node-$number"
  else
    echo "node-$number: set up; start it with federation.sh start $folder"
  fi
}

service() {
  [[ $# -ge 1 ]] || die "service: give the folder of the app, then the run's keys as for flwr run"
  local app
  app=$(realpath -m "$1")
  shift
  [[ -r $app/pyproject.toml ]] || die "$app: contains no pyproject.toml; it must be the folder of the app"
  need python3 "activate the environment that contains Flower"
  mkdir -p "$folder/run"
  python3 - "$folder" "$app/pyproject.toml" "$@" <<'PYTHON'
import json, sys, tomllib
from pathlib import Path

from flwr.common.config import flatten_dict, parse_config_args

folder, project = map(Path, sys.argv[1:3])
told = {"run-name": "living", "results-dir": str(folder / "results"), "resume": True}
try:
    told |= parse_config_args(sys.argv[3:])
    declared = flatten_dict(tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"])
except Exception as error:  # Flower's own kinds
    sys.exit(f"error: RUN-CONFIG: {' '.join(str(error).split())}")
if unknown := sorted(told.keys() - declared):
    sys.exit(f"error: RUN-CONFIG: {project} declares no key {', '.join(unknown)}")
new = folder / "run" / "config.toml.new"
new.write_text("".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in told.items()), encoding="utf-8")
new.replace(folder / "run" / "config.toml")
PYTHON
  ln -sfn "$app" "$folder/run/app"  # which the service reads at each submission
  write "$folder/run/env" "FEDKACE_APP=$folder/run/app" "FEDKACE_CONNECTION=$connection" "FEDKACE_RUN=$folder/run/config.toml" \
    "FEDKACE_RUN_ID=$folder/run/id"
  if running run; then
    kill -HUP "$(cat "$folder/run/pid")"
    echo "run: goes on with $folder/run/config.toml"
  else
    echo "run: is set up with $folder/run/config.toml; start it with federation.sh start $folder"
  fi
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
  nodes=0 connection='' inboxes='' more=''
  # shellcheck source=/dev/null
  source "$folder/settings"
  members=(superlink superexec)
  local number
  for ((number = 1; number <= nodes; number++)); do members+=("node-$number"); done
  if [[ -e $folder/run/env ]]; then members+=(run); fi
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
  if [[ $1 != node-* ]]; then script=$1.sh; fi
  (
    set -a
    # shellcheck source=/dev/null
    source "$folder/$1/env"
    export FEDKACE_MEMBER=$folder/$1
    cd "$folder/$1"
    exec setsid "$scripts/$script" </dev/null > >(keep log) 2>&1
  ) &
  echo $! >"$folder/$1/pid"
}

# keep FILE: append the input to a file, and start a new one whenever it is full. A reader that ended early would end its
# writer too, so a full disk costs only the log.
keep() {
  trap '' INT TERM HUP
  exec >/dev/null 2>&1
  local size
  while size=$(stat -c %s "$1" 2>/dev/null || echo 0); do
    if [[ $size -ge $log_bytes ]]; then mv "$1" "$1.1" && size=0; fi
    dd bs=64K count=$((log_bytes - size)) iflag=count_bytes oflag=append conv=notrunc of="$1" || break
    [[ $(stat -c %s "$1") -ge $log_bytes ]] || break
  done
  exec cat
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
      if [[ ${began[$name]} -gt $((log_bytes / 2)) ]]; then mv "$folder/$name/log" "$folder/$name/log.1" && began[$name]=0; fi
      new+=("$name")
    fi
  done
  for name in ${new[@]+"${new[@]}"}; do
    if [[ $name == node-* ]]; then
      [[ -n ${registered:-} ]] || register "${new[@]}"
      registered=yes
      is_registered "$name" || continue
    fi
    if [[ $name == run ]]; then continue; fi
    begin "$name"
    if [[ $name == superlink ]]; then until_ready superlink 'Uvicorn running'; fi
  done
  for name in ${new[@]+"${new[@]}"}; do
    case $name in
      run)
        if [[ $# -gt 0 && -n $(ended) ]]; then rm -f "$folder/run/id"; fi
        if [[ -n $(ended) ]]; then
          echo "run: $(ended); it goes on with federation.sh start $folder run"
          continue
        fi
        begin run
        until_ready run '^20[0-9-]* '
        echo "run: started: $(latest run | tail -n 1 | cut -c21-)"
        continue
        ;;
      superexec) until_ready superexec 'Starting Flower SuperExec' ;;
      node-*)
        is_registered "$name" || continue
        until_ready "$name" 'SuperNode ID'
        ;;
    esac
    echo "$name: started"
  done
}

register() {
  local name keys=()
  running superlink || die "the SuperLink is not running; start it with federation.sh start $folder superlink"
  for name; do if [[ $name == node-* ]]; then keys+=("$folder/$name/key.pub=$((${name#node-} - 1))"); fi; done
  "$scripts/register.sh" "$connection" "${keys[@]}" >/dev/null || [[ $? -eq 3 ]] || exit 1  # 3: a key has been unregistered
}

# is_registered NODE: whether its key was registered at the last start of a node.
is_registered() {
  grep -q " $1 " "$FEDKACE_NODES"
}

# ended: print how the run was stopped on purpose, if it was.
ended() {
  local number how
  read -r number how 2>/dev/null <"$folder/run/id" || true
  if [[ -n ${how:-} ]]; then echo "$how"; fi
}

stop() {
  local name first=() servers=()
  chosen "$@"
  for name in "${members[@]}"; do
    if [[ $name == super* ]]; then servers=("$name" ${servers[@]+"${servers[@]}"}); else first=("$name" ${first[@]+"${first[@]}"}); fi
  done
  # Stop the nodes first, so that they can sign off from the SuperLink and reconnect at once. Stop the SuperLink last.
  end ${first[@]+"${first[@]}"}
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
    elif [[ $name == run && -n $(ended) ]]; then
      echo "$name: $(ended)"
    elif [[ $name == node-* && -e $FEDKACE_NODES ]] && ! is_registered "$name"; then
      echo "$name: not registered"
    else
      echo "$name: not running"
      code=1
    fi
  done
  return $code
}

case ${1:-} in
  setup | add-node | service | start | stop | status) ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac
[[ $# -ge 2 && $2 != -* ]] || die "$1: give the federation's folder"
task=$1 folder=$(realpath -m "$2")
[[ $folder != *\'* && $folder != *[[:space:]]* ]] || die "'$folder': must not contain spaces or quotes"
unquoted FOLDER "$folder"
export FEDKACE_NODES=$folder/superlink/nodes
shift 2
if [[ $task != setup ]]; then read_settings; fi
"$task" "$@"
