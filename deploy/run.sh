#!/usr/bin/env bash
# Keep a run going: submit it, wait for its end, and submit it again until it is stopped on purpose.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $# -gt 0 ]]; then
  cat <<'TEXT'
usage: run.sh        on the SuperLink's machine; settings are environment variables, for example from systemd:

FEDKACE_APP            folder of the app
FEDKACE_CONNECTION     the SuperLink, as named with connection.sh
FEDKACE_RUN            TOML file of the run's keys; run-name, results-dir and resume = true must be among them
FEDKACE_RUN_ID         file that keeps Flower's number of the run, by default /var/lib/fedkace-superlink/run-id

A run that fails is submitted again after 10 seconds, later up to 5 minutes. `fedkace stop`, `flwr stop` or the last
round end this program with code 0, and it does nothing more until FEDKACE_RUN_ID is removed. SIGHUP stops the run and
submits it again with the app and the keys as they are then. To end the program does not end the run.
TEXT
  [[ $1 == -h || $1 == --help ]] && exit
  exit 2
fi

trap '' HUP  # which run.py inherits: until it listens for a reload, one would end it, for systemd without a failure
needs_setting FEDKACE_APP "name the folder of the app"
needs_setting FEDKACE_CONNECTION "name the SuperLink, see connection.sh"
needs_setting FEDKACE_RUN "name the TOML file of the run's keys"
file=${FEDKACE_RUN_ID:-/var/lib/fedkace-superlink/run-id}
need_flower flwr
[[ -r $FEDKACE_APP/pyproject.toml ]] || die "FEDKACE_APP = $FEDKACE_APP: contains no pyproject.toml that $(id -un) can read"
readable "$FEDKACE_RUN" "FEDKACE_RUN, the run's keys"
[[ -w $(dirname "$file") ]] || die "FEDKACE_RUN_ID = $file: $(id -un) cannot write to its folder"
quiet_flower
exec python3 "$(dirname "${BASH_SOURCE[0]}")/run.py" "$FEDKACE_APP" "$FEDKACE_CONNECTION" "$FEDKACE_RUN" "$file"
