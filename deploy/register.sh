#!/usr/bin/env bash
# Register the public keys of SuperNodes with the SuperLink, once for each node before its first start.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help | '')
    echo 'usage: register.sh CONNECTION KEY.pub...    CONNECTION as created by connection.sh; registered keys are not changed'
    [[ -n ${1:-} ]] && exit
    exit 2
    ;;
esac
connection=$1
shift
[[ $# -ge 1 ]] || die "give the public keys to register, for example: register.sh $connection edge-1.pub"
need_flower flwr
need ssh-keygen "apt-get install openssh-client"
quiet_flower
for key; do
  public_key "$key"
  name=$(name_of_key "$key")
  if said=$(NO_COLOR=1 flwr supernode register "$key" "$connection" --name "$name" 2>&1); then
    echo "$name: registered"
  elif [[ $said == *"already in use"* || $said == *"already"*"regist"* ]]; then
    echo "$name: already registered"
  else
    die "$key: the SuperLink did not accept it: $(tr -s '\n ' ' ' <<<"$said" | tail -c 400)"
  fi
done
