#!/usr/bin/env bash
# Register the public keys of SuperNodes with the SuperLink, once for each node before its first start.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $# -lt 2 || $1 == -h || $1 == --help ]]; then
  cat <<'TEXT'
usage: register.sh CONNECTION KEY.pub[=SEAT]...    CONNECTION as created by connection.sh; registered keys stay registered

Each node gets a line NODE_ID NAME [SEAT] in the file FEDKACE_NODES (by default /var/lib/fedkace-superlink/nodes), from
which runs learn the nodes' names. SEAT is the client number that the node has in every run, from 0; without one, a run
gives the node the next free number when it first appears. A key that has been unregistered is left out, with exit code 3.
TEXT
  [[ ${1:-} == -h || ${1:-} == --help ]] && exit
  exit 2
fi
connection=$1 keys=()
shift
need_flower flwr
need ssh-keygen "apt-get install openssh-client"
quiet_flower
for key; do
  seat=''
  if [[ ! -e $key && $key == *=* ]]; then
    seat=${key##*=} key=${key%=*}
    whole "the seat of $key" "$seat" 0 99999
  fi
  public_key "$key"
  name=$(name_of_key "$key")
  keys+=("$key"$'\n'"$name"$'\n'"$seat")
done
exec python3 "$(dirname "${BASH_SOURCE[0]}")/register.py" "$connection" "$nodes_file" "${keys[@]}"
