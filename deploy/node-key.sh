#!/usr/bin/env bash
# Create the key with which a SuperNode authenticates itself to the SuperLink: FILE (private, mode 0600) and FILE.pub.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help) echo 'usage: node-key.sh FILE [NAME]    NAME is the machine'\''s name, written to FILE.pub; by default the host name' && exit ;;
  '') die "give the file of the key, for example: node-key.sh /etc/fedkace/node.key" ;;
esac
need ssh-keygen "apt-get install openssh-client"
file=$1 name=${2:-$(hostname)}
plain_name NAME "$name"
[[ ! -e $file && ! -e $file.pub ]] || die "$file already exists; it is never overwritten, because the SuperLink identifies the node by it"
[[ -d $(dirname "$file") ]] || mkdir -p "$(dirname "$file")"
# P-384 is the curve that Flower requires. There is no passphrase, because the node starts unattended.
ssh-keygen -q -t ecdsa -b 384 -N '' -C "$name" -f "$file" || die "ssh-keygen could not write $file"
chmod 644 "$file.pub"
echo "$file"
echo "$file.pub"
