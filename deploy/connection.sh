#!/usr/bin/env bash
# Tell Flower's command line where the SuperLink is: an entry in config.toml of ~/.flwr, or of FLWR_HOME.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help)
    cat <<'TEXT'
usage: connection.sh NAME HOST:PORT CA_CERTIFICATE [--replace]

Afterwards `flwr run . NAME`, `flwr list NAME`, `flwr supernode list NAME` talk to that SuperLink. Other entries
stay as they are; another entry of this NAME is replaced with --replace alone.
TEXT
    exit
    ;;
esac
[[ $# -eq 3 || ($# -eq 4 && $4 == --replace) ]] || die "usage: connection.sh NAME HOST:PORT CA_CERTIFICATE [--replace]"
name=$1 address=$2 replace=${4:-}
[[ $name =~ ^[A-Za-z0-9_-]{1,64}$ ]] || die "NAME = '$name': must be letters, digits, dashes or underscores"
[[ $address =~ ^.+:[0-9]+$ ]] || die "'$address': must be HOST:PORT"
unquoted HOST:PORT "$address"
valid_certificate "$3" "the authority's certificate"
ca=$(realpath "$3")
unquoted CA_CERTIFICATE "$ca"
need_flower flwr
need python3 "activate the environment that holds Flower"
home=${FLWR_HOME:-$HOME/.flwr}
file=$home/config.toml
if [[ ! -e $file ]]; then
  # Flower writes its own defaults where there is nothing; without them a plain `flwr run .` would fail.
  FLWR_HOME=$home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 flwr config list >/dev/null 2>&1 || true
  [[ -e $file ]] || die "$file: Flower could not write its default configuration there"
fi
python3 - "$file" "$name" "$address" "$ca" "$replace" <<'PYTHON'
"""Add one table to a TOML file, with every other line of it as it was."""

import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path


def stop(text: str) -> None:
    sys.exit(f"error: {text}")


file, name, address, certificate, replace = Path(sys.argv[1]).resolve(), *sys.argv[2:]
before = file.read_text(encoding="utf-8")
try:
    links = tomllib.loads(before).get("superlink", {})
except tomllib.TOMLDecodeError as error:
    stop(f"{file} is not valid TOML: {error}")
wanted = {"address": address, "root-certificates": certificate}
if links.get(name) == wanted:
    print(f"{file}: {name} is {address} already")
    sys.exit()
rest = before
if name in links:
    if not replace:
        stop(f"{file} has another entry superlink.{name} ({links[name].get('address')}); --replace, or another NAME")
    header = re.compile(rf"^\[superlink\.(?:{re.escape(name)}|\"{re.escape(name)}\")(?:\..*)?\]")
    kept, inside = [], False
    for line in before.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = bool(header.match(line.strip()))
        if not inside:
            kept.append(line)
    rest = "".join(kept)
gap = "" if not rest or rest.endswith("\n\n") else "\n" if rest.endswith("\n") else "\n\n"
after = f'{rest}{gap}[superlink.{name}]\naddress = "{address}"\nroot-certificates = "{certificate}"\n'
try:
    right = tomllib.loads(after)["superlink"] == {**links, name: wanted}
except tomllib.TOMLDecodeError:
    right = False
if not right:
    stop(f"{file}: superlink.{name} stands there in a form that only you can change; edit it by hand")
with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as aside:
    aside.write(after)
os.chmod(aside.name, file.stat().st_mode & 0o777)
os.replace(aside.name, file)
print(f"{file}: {name} is {address}")
PYTHON
