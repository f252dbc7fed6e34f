#!/usr/bin/env bash
# Tell Flower's command line where the SuperLink is, with an entry in config.toml in FLWR_HOME, by default ~/.flwr.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help)
    cat <<'TEXT'
usage: connection.sh NAME HOST:PORT CA_CERTIFICATE [--replace]

Afterwards `flwr run . NAME`, `flwr list NAME` and `flwr supernode list NAME` use that SuperLink. Other entries are
not changed. An existing entry with the same NAME but other values is replaced only with --replace.
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
need python3 "activate the environment that contains Flower"
flower_home
file=$home/config.toml
if [[ ! -e $file ]]; then
  # Let Flower write its default entries first; without them a plain `flwr run .` would fail.
  FLWR_HOME=$home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 flwr config list >/dev/null 2>&1 || true
  [[ -e $file ]] || die "$file: Flower could not write its default configuration"
fi
python3 - "$file" "$name" "$address" "$ca" "$replace" <<'PYTHON'
"""Add one table to a TOML file without changing any other line."""

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
    print(f"{file}: {name} is already {address}")
    sys.exit()
rest = before
if name in links:
    if not replace:
        stop(f"{file} already has superlink.{name} ({links[name].get('address')}); use --replace or another NAME")
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
    stop(f"{file}: superlink.{name} is written in a form that this script cannot change; edit it by hand")
with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as aside:
    aside.write(after)
os.chmod(aside.name, file.stat().st_mode & 0o777)
os.replace(aside.name, file)
print(f"{file}: {name} is {address}")
PYTHON
