#!/usr/bin/env bash
# Create the federation's certificate authority and the SuperLink's certificate.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: certificates.sh ca FOLDER [--days N]
       certificates.sh superlink FOLDER [--days N] [--renew] NAME...
       certificates.sh show FOLDER

ca         creates FOLDER/ca.key and FOLDER/ca.crt. Every machine gets ca.crt; ca.key never leaves its folder.
superlink  creates FOLDER/superlink.key and FOLDER/superlink.crt, signed by the authority, for all NAMEs (DNS names
           and IP addresses) under which machines reach the SuperLink. localhost and 127.0.0.1 are always included,
           because the SuperLink's own processes use them. --renew replaces the certificate and keeps the key.
           Also creates superexec.secret, with which the process that starts the server's part of a run
           authenticates itself to the SuperLink.
show       prints the names and expiry dates of the certificates.

Private files have mode 0600. Existing files are never overwritten, except a certificate with --renew.
TEXT
}

subject() {
  printf '/O=fedkace_flwr/CN=%s' "$1"
}

make_ca() {
  [[ ! -e $folder/ca.key && ! -e $folder/ca.crt ]] \
    || die "$folder/ca.crt already exists and nodes trust it; create a new authority in a new folder"
  make openssl req -x509 -new -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -sha384 -days "$days" \
    -subj "$(subject 'federation CA')" -addext 'basicConstraints=critical,CA:TRUE,pathlen:0' \
    -addext 'keyUsage=critical,keyCertSign,cRLSign' -keyout "$work/ca.key" -out "$work/ca.crt"
  place ca.key ca.crt
}

make_superlink() {
  local alternatives=DNS:localhost,IP:127.0.0.1 name
  [[ $# -ge 1 ]] || die "superlink: give at least one DNS name or IP address under which machines reach the SuperLink"
  for name; do
    [[ $name == localhost || $name == 127.0.0.1 ]] || alternatives+=,$(alternative "$name")
  done
  valid_certificate "$folder/ca.crt" "the authority's certificate"
  if [[ -z $renew ]]; then
    [[ ! -e $folder/superlink.key && ! -e $folder/superlink.crt ]] \
      || die "$folder/superlink.crt already exists; --renew replaces the certificate and keeps the key"
    make openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:secp384r1 -out "$work/superlink.key"
  else
    private "$folder/superlink.key" "the SuperLink's key"
    cp "$folder/superlink.key" "$work/superlink.key"
  fi
  make openssl req -new -key "$work/superlink.key" -subj "$(subject "$1")" -out "$work/request"
  cat >"$work/extensions" <<TEXT
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $alternatives
TEXT
  make openssl x509 -req -in "$work/request" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -sha384 -days "$days" \
    -set_serial "0x$(openssl rand -hex 16)" -extfile "$work/extensions" -out "$work/superlink.crt"
  if [[ -z $renew ]]; then
    openssl rand -hex 32 >"$work/superexec.secret"
    place superlink.key superexec.secret
  fi
  place superlink.crt
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

# openssl reports its progress dot by dot; show its output only if it fails.
make() {
  "$@" 2>"$work/complaint" || die "openssl failed: $(grep -v '^-*$' "$work/complaint" | tail -n 1)"
}

# Move finished files to the folder, so that no file is ever visible half-written.
place() {
  local file
  for file; do
    if [[ $file == *.crt ]]; then chmod 644 "$work/$file"; fi
    mv "$work/$file" "$folder/$file"
    echo "$folder/$file"
  done
}

show() {
  local file
  for file in ca superlink; do
    readable "$folder/$file.crt" certificate
    echo "$folder/$file.crt"
    openssl x509 -noout -subject -enddate -ext subjectAltName -in "$folder/$file.crt" 2>/dev/null | sed 's/^ */  /'
  done
}

case ${1:-} in
  ca) days=3650 ;;
  superlink) days=825 ;;
  show) days=1 ;;
  -h | --help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac
task=$1 renew='' names=()
shift
[[ $# -ge 1 && $1 != -* ]] || die "$task: give the folder of the certificates"
folder=$1
shift
while [[ $# -gt 0 ]]; do
  case $1 in
    --days) needs_value "$@" && days=$2 && shift ;;
    --renew) renew=yes ;;
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
if [[ $task == superlink ]]; then private "$folder/ca.key" "the authority's key"; fi
[[ -d $folder ]] || mkdir -p "$folder"
work=$(mktemp -d "$folder/.making-XXXXXX")
trap 'rm -rf "$work"' EXIT
"make_$task" ${names[@]+"${names[@]}"}
