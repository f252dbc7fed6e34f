#!/usr/bin/env bash
# Let SuperNodes in: register their public keys with the SuperLink. Once for each node, before its first start.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help | '')
    echo 'usage: register.sh CONNECTION KEY.pub...    CONNECTION as made by connection.sh; a key known already is left alone'
    [[ -n ${1:-} ]] && exit
    exit 2
    ;;
esac
connection=$1
shift
[[ $# -ge 1 ]] || die "name the public keys to register, for example: register.sh $connection edge-1.pub"
need_flower flwr
need ssh-keygen "apt-get install openssh-client"
quiet_flower
for key; do
  readable "$key" "a public key"
  [[ $(ssh-keygen -lf "$key" 2>/dev/null) == 384\ *\(ECDSA\) ]] || die "$key is not a public ECDSA key of 384 bits; see node-key.sh"
  name=$(awk '{ print $3; exit }' "$key")
  plain_name "the comment of $key" "$name"
  if said=$(NO_COLOR=1 flwr supernode register "$key" "$connection" --name "$name" 2>&1); then
    echo "$name: registered"
  elif [[ $said == *"already in use"* || $said == *"already"*"regist"* ]]; then
    echo "$name: registered already"
  else
    die "$key: the SuperLink did not take it: $(tr -s '\n ' ' ' <<<"$said" | tail -c 400)"
  fi
done
