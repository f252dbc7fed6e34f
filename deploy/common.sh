# shellcheck shell=bash
# Shared by the scripts of this folder: one-line errors, and checks of files and addresses.

set -euo pipefail
umask 077

# The parts of a federation on one machine reach each other directly, whatever proxy the environment names.
no_proxy=${no_proxy:-${NO_PROXY:-}}
export no_proxy=${no_proxy:+$no_proxy,}localhost,127.0.0.1,::1
export NO_PROXY=$no_proxy

# die TEXT: print one line to stderr and exit with code 2.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# need COMMAND HINT
need() {
  command -v "$1" >/dev/null || die "$1 is not installed; $2"
}

need_flower() {
  need "$1" "activate the environment that contains Flower, or put its bin/ first in PATH"
}

need_openssl() {
  need openssl "apt-get install openssl"
}

# needs_value OPTION REST...: fail unless a value follows the option.
needs_value() {
  [[ $# -ge 2 ]] || die "$1: needs a value"
}

# needs_setting NAME WHAT: fail unless the environment variable, which has no default, is set.
needs_setting() {
  [[ -n ${!1:-} ]] || die "$1 is not set: it must $2"
}

# flower_home: set `home` to the folder of Flower's command line.
flower_home() {
  [[ -n ${FLWR_HOME:-} ]] || needs_setting HOME "name your home folder; or set FLWR_HOME, the folder of Flower's settings"
  # shellcheck disable=SC2034  # for the caller
  home=${FLWR_HOME:-$HOME/.flwr}
}

# readable FILE WHAT
readable() {
  [[ -f $1 ]] || die "$1 ($2) does not exist"
  [[ -r $1 ]] || die "$1 ($2) cannot be read by $(id -un)"
}

# private FILE WHAT: fail unless only its owner can read the file.
private() {
  local mode
  readable "$1" "$2"
  mode=$(stat -Lc %a "$1")
  [[ $((8#$mode & 8#077)) -eq 0 ]] || die "$1 ($2) has mode $mode, so others can read it; run chmod 600 $1"
}

# unalterable FILE WHAT: fail if others than its owner can change the file.
unalterable() {
  local mode
  readable "$1" "$2"
  mode=$(stat -Lc %a "$1")
  [[ $((8#$mode & 8#022)) -eq 0 ]] || die "$1 ($2) has mode $mode, so others can change it; run chmod go-w $1"
}

# whole NAME VALUE [MIN [MAX]]: fail unless the value is a whole number within the bounds.
whole() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "$1 = '$2': must be a whole number"
  [[ $2 -ge ${3:-0} && $2 -le ${4:-999999999} ]] || die "$1 = '$2': must be between ${3:-0} and ${4:-999999999}"
}

# plain_name NAME VALUE: fail unless the value can name a folder and a key in a node's configuration.
plain_name() {
  [[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] \
    || die "$1 = '$2': must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit"
}

# unquoted NAME VALUE: fail unless the value can stand between double quotes in Flower's --node-config.
unquoted() {
  [[ $2 != *[\"\\\']* && $2 != *$'\n'* ]] || die "$1 = '$2': must not contain quotes, backslashes or line breaks"
}

# The nodes that are registered: lines NODE_ID NAME [SEAT], written by register.sh and read by the ServerApp.
# shellcheck disable=SC2034  # for scripts that source this file
nodes_file=${FEDKACE_NODES:-/var/lib/fedkace-superlink/nodes}

soon=30  # days before its end in which a certificate's use is warned about

# valid_certificate FILE WHAT: fail unless the file is a readable certificate that has not expired; warn if it soon will.
valid_certificate() {
  local end
  readable "$1" "$2"
  need_openssl
  end=$(openssl x509 -noout -enddate -in "$1" 2>/dev/null) || die "$1 ($2) is not a certificate in PEM format"
  openssl x509 -noout -checkend 0 -in "$1" >/dev/null \
    || die "$1 ($2) has expired (${end#notAfter=}); create a new one (docs/deployment.md, \"Certificates\"), or correct this machine's clock, now $(date -u)"
  openssl x509 -noout -checkend $((soon * 86400)) -in "$1" >/dev/null \
    || echo "warning: $1 ($2) expires within $soon days (${end#notAfter=}); renew it (docs/deployment.md, \"Certificates\")" >&2
}

# public_key FILE: fail unless the file is the public key of a SuperNode.
public_key() {
  readable "$1" "a public key"
  [[ $(ssh-keygen -lf "$1" 2>/dev/null) == 384\ *\(ECDSA\) ]] || die "$1 is not a 384-bit ECDSA public key; see node-key.sh"
}

# name_of_key FILE: print the machine's name in a public key.
name_of_key() {
  local name
  name=$(awk '{ print $3; exit }' "$1")
  plain_name "the comment of $1" "$name"
  echo "$name"
}

# through_proxy HOST: say if the environment sends connections to a host through a proxy, without the proxy's password.
through_proxy() {
  [[ -z ${https_proxy:-}${HTTPS_PROXY:-}${ALL_PROXY:-}${all_proxy:-} || ",$no_proxy," == *",$1,"* ]] \
    || echo "note: $1 is reached through the proxy that https_proxy names; if it is not meant to be, add $1 to no_proxy" >&2
}

# listening HOST PORT: whether something listens on the port.
listening() {
  (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}

# free_port HOST PORT NAME: fail if something listens on the port.
free_port() {
  local host=$1
  case $host in 0.0.0.0 | '' ) host=127.0.0.1 ;; ::) host=::1 ;; esac
  ! listening "$host" "$2" || die "$3 = $2: port $2 of $host is already in use; choose another port"
}

# By default Flower reports usage and checks for updates; an edge machine does neither unless its settings say so.
quiet_flower() {
  export FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
  export FLWR_DISABLE_UPDATE_CHECK="${FLWR_DISABLE_UPDATE_CHECK:-1}"
  export PYTHONUNBUFFERED=1
}
