#!/usr/bin/env bash
# Create the federation's certificate authority, the SuperLink's certificate and those of the SuperNodes.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: certificates.sh ca FOLDER [--days N] [--passphrase | --passphrase-file FILE]
       certificates.sh superlink FOLDER [--days N] [--renew] [--passphrase-file FILE] NAME...
       certificates.sh node FOLDER [--days N] [--renew] [--passphrase-file FILE] KEY.pub...
       certificates.sh show FOLDER

ca         creates FOLDER/ca.key and FOLDER/ca.crt. Every machine gets ca.crt; ca.key never leaves its folder.
           With --passphrase the key is encrypted with a passphrase that you type, with --passphrase-file with the
           first line of FILE; the other commands then ask for it or take the same option.
superlink  creates FOLDER/superlink.key and FOLDER/superlink.crt, signed by the authority, for all NAMEs (DNS names
           and IP addresses) under which machines reach the SuperLink. localhost and 127.0.0.1 are always included,
           because the SuperLink's own processes use them. --renew replaces the certificate and keeps the key.
           Also creates superexec.secret, with which the process that starts the server's part of a run
           authenticates itself to the SuperLink.
node       creates FOLDER/nodes/NAME.crt for each public key (node-key.sh), where NAME is the machine's name in the
           key. A machine needs it to get past nginx to the SuperLink. --renew replaces it.
show       prints the names and expiry dates of the certificates; the exit code is 1 if one expires within 30 days.

By default the authority is valid for 1825 days, the SuperLink's and the SuperNodes' certificates for 397.
Private files have mode 0600. Existing files are never overwritten, except a certificate with --renew.
TEXT
}

subject() {
  printf '/O=fedkace_flwr/CN=%s' "$1"
}

make_ca() {
  absent "nodes may trust this authority; create a new one in a new folder" ca.key ca.crt
  if [[ -n $ask ]]; then ask_for_new_passphrase; fi
  if [[ -n $passphrase ]]; then
    [[ ${#passphrase} -ge 12 ]] || die "the passphrase of $folder/ca.key has ${#passphrase} characters: must have at least 12"
    make new_encrypted_key "$work/ca.key"
  else
    make new_key "$work/ca.key"
  fi
  make openssl req -x509 -new -key "$work/ca.key" -passin fd:3 -sha384 -days "$days" \
    -subj "$(subject 'federation CA')" -addext 'basicConstraints=critical,CA:TRUE,pathlen:0' \
    -addext 'keyUsage=critical,keyCertSign,cRLSign' -out "$work/ca.crt" 3< <(secret)
  place . ca.key ca.crt
}

new_key() {
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:secp384r1 -out "$1"
}

# The key goes through a pipe, so that it is never written unencrypted.
new_encrypted_key() {
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:secp384r1 \
    | openssl pkcs8 -topk8 -v2 aes-256-cbc -v2prf hmacWithSHA256 -iter 600000 -passout fd:3 -out "$1" 3< <(secret)
}

make_superlink() {
  local alternatives=DNS:localhost,IP:127.0.0.1 name
  [[ $# -ge 1 ]] || die "superlink: give at least one DNS name or IP address under which machines reach the SuperLink"
  for name; do
    [[ $name == localhost || $name == 127.0.0.1 ]] || alternatives+=,$(alternative "$name")
  done
  if [[ -z $renew ]]; then
    absent "--renew replaces the certificate and keeps the key" superlink.key superlink.crt
    make new_key "$work/superlink.key"
  else
    private "$folder/superlink.key" "the SuperLink's key"
    cp "$folder/superlink.key" "$work/superlink.key"
  fi
  make openssl pkey -in "$work/superlink.key" -pubout -out "$work/public"
  sign superlink.crt "$1" serverAuth "$alternatives"
  if [[ -z $renew ]]; then
    openssl rand -hex 32 >"$work/superexec.secret"
    place . superexec.secret superlink.key  # what comes after the key, --renew can make
  fi
  place . superlink.crt
}

make_node() {
  local key name names=()
  [[ $# -ge 1 ]] || die "node: give the public keys of machines, for example /etc/fedkace/nodes/edge-1.pub"
  need ssh-keygen "apt-get install openssh-client"
  for key; do
    public_key "$key"
    name=$(name_of_key "$key")
    [[ " ${names[*]-} " != *" $name "* ]] || die "$key: another key also has the name $name"
    [[ -n $renew || ! -e $folder/nodes/$name.crt ]] || die "$folder/nodes/$name.crt already exists; --renew replaces it"
    names+=("$name")
  done
  for key; do
    name=$(name_of_key "$key")
    ssh-keygen -e -m PKCS8 -f "$key" >"$work/public" || die "$key: ssh-keygen cannot convert it"
    sign "$name.crt" "$name" clientAuth "DNS:$name"
  done
  mkdir -p "$folder/nodes"
  place nodes "${names[@]/%/.crt}"
}

# sign FILE NAME USE ALTERNATIVES: make a certificate of the authority for the public key in $work/public. Its use is
# limited, so that a machine cannot pose as the SuperLink.
sign() {
  cat >"$work/extensions" <<TEXT
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = $3
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $4
TEXT
  make openssl x509 -new -force_pubkey "$work/public" -subj "$(subject "$2")" -CA "$folder/ca.crt" \
    -CAkey "$folder/ca.key" -passin fd:3 -sha384 -days "$days" -set_serial "0x$(openssl rand -hex 16)" \
    -extfile "$work/extensions" -out "$work/$1" 3< <(secret)
}

# Passphrases go through pipes: neither files nor command lines, which others could read, hold them.
secret() {
  printf '%s\n' "$passphrase"
}

ask_for_new_passphrase() {
  local again
  [[ -t 0 ]] || die "--passphrase: there is no terminal to type it; use --passphrase-file FILE"
  read -rsp "Passphrase for $folder/ca.key: " passphrase && echo >&2
  read -rsp "Again: " again && echo >&2
  [[ $passphrase == "$again" ]] || die "the passphrases differ"
}

# Get the passphrase of an encrypted key before anything is made.
unlock() {
  local key=$folder/ca.key
  private "$key" "the authority's key"
  if ! grep -q ENCRYPTED "$key"; then
    [[ -z $passphrase ]] || die "--passphrase-file: $key is not encrypted"
    return
  fi
  if [[ -z $passphrase ]]; then
    [[ -t 0 ]] || die "$key is encrypted; use --passphrase-file FILE"
    read -rsp "Passphrase for $key: " passphrase && echo >&2
  fi
  openssl pkey -in "$key" -passin fd:3 -noout 3< <(secret) 2>/dev/null || die "$key: the passphrase is wrong"
}

# An IP address must be listed under IP in a certificate; clients do not accept it under DNS.
alternative() {
  if [[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$ || ($1 == *:* && $1 =~ ^[0-9A-Fa-f:.]+$) ]]; then
    printf 'IP:%s' "$1"
  elif [[ $1 =~ ^([A-Za-z0-9*]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$ ]]; then
    printf 'DNS:%s' "$1"
  else
    die "'$1': must be a DNS name or an IP address, without a port"
  fi
}

# absent HINT FILE...: fail if a file is already in the folder.
absent() {
  local file hint=$1
  shift
  for file; do [[ ! -e $folder/$file ]] || die "$folder/$file already exists; $hint"; done
}

# openssl reports its progress dot by dot; show its output only if it fails.
make() {
  "$@" 2>"$work/complaint" || die "openssl failed: $(grep -v '^-*$' "$work/complaint" | tail -n 1)"
}

# place WHERE FILE...: move finished files to the folder, so that no file is ever visible half-written.
place() {
  local file to=$folder
  if [[ $1 != . ]]; then to+=/$1; fi
  shift
  for file; do
    if [[ $file == *.crt ]]; then chmod 644 "$work/$file"; fi
    mv "$work/$file" "$to/$file"
    echo "$to/$file"
  done
}

show() {
  local file code=0
  for file in "$folder/ca.crt" "$folder/superlink.crt" "$folder"/nodes/*.crt; do
    [[ -e $file || $file == "$folder/ca.crt" ]] || continue
    readable "$file" certificate
    echo "$file"
    openssl x509 -noout -subject -enddate -ext subjectAltName -in "$file" 2>/dev/null | sed 's/^ */  /'
    openssl x509 -noout -checkend $((soon * 86400)) -in "$file" >/dev/null || { echo "  expires within $soon days" && code=1; }
  done
  return $code
}

case ${1:-} in
  ca) days=1825 ;;
  superlink | node) days=397 ;;
  show) days=1 ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac
task=$1 renew='' ask='' passphrase='' passphrase_file='' names=()
shift
[[ $# -ge 1 && $1 != -* ]] || die "$task: give the folder of the certificates"
folder=$1
shift
while [[ $# -gt 0 ]]; do
  case $1 in
    --days) needs_value "$@" && days=$2 && shift ;;
    --renew) renew=yes ;;
    --passphrase) ask=yes ;;
    --passphrase-file) needs_value "$@" && passphrase_file=$2 && shift ;;
    -*) die "$1: unknown option; see certificates.sh --help" ;;
    *) names+=("$1") ;;
  esac
  shift
done
whole --days "$days" 1 36500
need_openssl
if [[ $task == show ]]; then
  show
  exit
fi
[[ -z $ask || $task == ca ]] || die "--passphrase: only for ca; $task asks for the passphrase of an encrypted key by itself"
if [[ -n $passphrase_file ]]; then
  private "$passphrase_file" "--passphrase-file"
  IFS= read -r passphrase <"$passphrase_file" || [[ -n $passphrase ]] || die "$passphrase_file (--passphrase-file) is empty"
fi
if [[ $task != ca ]]; then
  valid_certificate "$folder/ca.crt" "the authority's certificate"
  unlock
fi
[[ -d $folder ]] || mkdir -p "$folder"
work=$(mktemp -d "$folder/.making-XXXXXX")
trap 'rm -rf "$work"' EXIT
"make_$task" ${names[@]+"${names[@]}"}
