# shellcheck shell=bash
# Sourced by the scripts beside it: one-line errors, checks of files and addresses.

set -euo pipefail
umask 077

# die TEXT: one line on the error stream, exit code 2.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# need COMMAND HINT
need() {
  command -v "$1" >/dev/null || die "$1 is not installed; $2"
}

need_flower() {
  need "$1" "activate the environment that holds Flower, or put its bin/ first in PATH"
}

need_openssl() {
  need openssl "apt-get install openssl"
}

# needs_value OPTION REST...: the option's value, or an error that names the option.
needs_value() {
  [[ $# -ge 2 ]] || die "$1: a value must follow"
}

# needs_setting NAME WHAT: an environment variable that has no default.
needs_setting() {
  [[ -n ${!1:-} ]] || die "$1 is not set: it must $2"
}

# readable FILE WHAT
readable() {
  [[ -f $1 ]] || die "$1 ($2) does not exist"
  [[ -r $1 ]] || die "$1 ($2) cannot be read by $(id -un)"
}

# private FILE WHAT: readable by its owner alone.
private() {
  local mode
  readable "$1" "$2"
  mode=$(stat -Lc %a "$1")
  [[ $((8#$mode & 8#077)) -eq 0 ]] || die "$1 ($2) has mode $mode, others can read it; chmod 600 $1"
}

# whole NAME VALUE [LEAST [MOST]]: a whole number within bounds.
whole() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "$1 = '$2': must be a whole number"
  [[ $2 -ge ${3:-0} && $2 -le ${4:-999999999} ]] || die "$1 = '$2': must be between ${3:-0} and ${4:-999999999}"
}

# plain_name NAME VALUE: fit for a folder and a key in a node's configuration.
plain_name() {
  [[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] \
    || die "$1 = '$2': must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit"
}

# unquoted NAME VALUE: fit to stand between double quotes in Flower's --node-config.
unquoted() {
  [[ $2 != *[\"\\\']* && $2 != *$'\n'* ]] || die "$1 = '$2': must hold no quotes, backslashes or line breaks"
}

# valid_certificate FILE WHAT: readable, and not expired.
valid_certificate() {
  local end
  readable "$1" "$2"
  need_openssl
  end=$(openssl x509 -noout -enddate -in "$1" 2>/dev/null) || die "$1 ($2) is not a certificate in PEM format"
  openssl x509 -noout -checkend 0 -in "$1" >/dev/null \
    || die "$1 ($2) has expired, ${end#notAfter=}; make a new one (docs/deployment.md, \"Certificates\"), or set the clock, $(date -u)"
}

# listening HOST PORT: whether somebody answers there.
listening() {
  (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}

# free_port HOST PORT NAME: nobody listens there yet.
free_port() {
  local host=$1
  case $host in 0.0.0.0 | '' ) host=127.0.0.1 ;; ::) host=::1 ;; esac
  ! listening "$host" "$2" || die "$3 = $2: something listens on port $2 of $host already; choose another port"
}

# Flower's own defaults report usage and look for updates; an edge machine does neither unless told to.
quiet_flower() {
  export FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
  export FLWR_DISABLE_UPDATE_CHECK="${FLWR_DISABLE_UPDATE_CHECK:-1}"
  export PYTHONUNBUFFERED=1
}
