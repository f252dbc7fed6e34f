#!/usr/bin/env bash
# Check whether this machine's SuperLink or SuperNode responds, for Docker's HEALTHCHECK and similar probes.
# A healthy SuperNode may still be waiting for its SuperLink; `flwr supernode list` shows which nodes are connected.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -eq 1 && ($1 == superlink || $1 == supernode) ]] || die "usage: health.sh superlink|supernode, in the same environment as superlink.sh or supernode.sh"
if [[ $1 == supernode ]]; then
  url=http://127.0.0.1:${FEDKACE_RUNTIME_PORT:-9094}/health certificate=''
else
  needs_setting FEDKACE_CERTIFICATES "name the folder of ca.crt"
  url=https://127.0.0.1:${FEDKACE_PORT:-9092}/health certificate=$FEDKACE_CERTIFICATES/ca.crt
fi
python3 - "$url" "$certificate" <<'PYTHON'
import ssl, sys, urllib.request

url, certificate = sys.argv[1:]
trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate)) if certificate else None
handlers = [urllib.request.ProxyHandler({}), *([trusted] if trusted else [])]
try:
    urllib.request.build_opener(*handlers).open(url, timeout=5)
except OSError as error:
    sys.exit(f"error: {url}: {error}")
PYTHON
