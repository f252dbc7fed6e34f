#!/usr/bin/env bash
# Run this machine's SuperNode. It verifies the SuperLink's certificate and authenticates itself with its key.
# shellcheck source=deploy/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $# -gt 0 ]]; then
  cat <<'TEXT'
usage: supernode.sh        settings are environment variables, for example from systemd's EnvironmentFile:

FEDKACE_SUPERLINK      HOST:PORT of the SuperLink; HOST is a name or address listed in its certificate
FEDKACE_CA             the authority's certificate, ca.crt
FEDKACE_KEY            this machine's private key (node-key.sh); its .pub must be registered (register.sh)
FEDKACE_CERTIFICATE    this machine's certificate (certificates.sh node), for which the hub's nginx asks; empty: none
FEDKACE_NODE           this machine's permanent name, under which its state is stored
FEDKACE_STATE          folder for this machine's state, buffer and models
FEDKACE_INBOX          folder in which new samples arrive; empty: use the run's data set
FEDKACE_MODELS         folder for models that its group may read, for fedkace-serve; empty: keep them with the state
FEDKACE_TRUSTED        YAML file of keys, NAME: ssh-ed25519 ...; apps signed with none of them are refused; empty: any app
FEDKACE_POLICY         TOML file that says which runs this machine accepts; empty: all
FEDKACE_NODE_CONFIG    additional node configuration, for example 'camera="north"'
FEDKACE_RUNTIME_PORT   loopback port for this SuperNode's own processes, by default 9094
TEXT
  [[ $1 == -h || $1 == --help ]] && exit
  exit 2
fi

needs_setting FEDKACE_SUPERLINK "be HOST:PORT of the SuperLink"
needs_setting FEDKACE_CA "name the authority's certificate, ca.crt"
needs_setting FEDKACE_KEY "name this machine's private key, see node-key.sh"
needs_setting FEDKACE_NODE "be this machine's permanent name"
needs_setting FEDKACE_STATE "name the folder for this machine's state"
superlink=$FEDKACE_SUPERLINK ca=$FEDKACE_CA key=$FEDKACE_KEY node=$FEDKACE_NODE state=$FEDKACE_STATE
certificate=${FEDKACE_CERTIFICATE:-} inbox=${FEDKACE_INBOX:-} models=${FEDKACE_MODELS:-}
trusted=${FEDKACE_TRUSTED:-} policy=${FEDKACE_POLICY:-} more=${FEDKACE_NODE_CONFIG:-} port=${FEDKACE_RUNTIME_PORT:-9094}
need_flower flower-supernode
need_openssl
[[ $superlink =~ ^.+:[0-9]+$ ]] || die "FEDKACE_SUPERLINK = '$superlink': must be HOST:PORT"
plain_name FEDKACE_NODE "$node"
whole FEDKACE_RUNTIME_PORT "$port" 1 65535
unquoted FEDKACE_STATE "$state"
unquoted FEDKACE_INBOX "$inbox"
unquoted FEDKACE_MODELS "$models"
[[ -z $models || -w $models ]] || die "FEDKACE_MODELS = $models: must be a folder in which $(id -un) can write"
valid_certificate "$ca" "FEDKACE_CA, the authority's certificate"
private "$key" "FEDKACE_KEY, this machine's key"
if [[ -n $certificate ]]; then
  valid_certificate "$certificate" "FEDKACE_CERTIFICATE, this machine's certificate"
  need ssh-keygen "apt-get install openssh-client"
  openssl verify -CAfile "$ca" -purpose sslclient "$certificate" >/dev/null 2>&1 \
    || die "FEDKACE_CERTIFICATE = $certificate: is not a certificate for a SuperNode (certificates.sh node) from $ca"
  [[ $(openssl x509 -in "$certificate" -noout -pubkey) == "$(ssh-keygen -y -P '' -f "$key" | ssh-keygen -e -m PKCS8 -f /dev/stdin)" ]] \
    || die "FEDKACE_CERTIFICATE = $certificate: belongs to another key than FEDKACE_KEY = $key"
fi
if [[ -n $trusted ]]; then
  unalterable "$trusted" "FEDKACE_TRUSTED, the keys of those who sign apps"
  # With no key in the file, Flower would check nothing.
  grep -Eq '^[^#]+:.*ssh-ed25519 ' "$trusted" || die "FEDKACE_TRUSTED = $trusted: contains no line NAME: ssh-ed25519 KEY"
fi
if [[ -n $policy ]]; then
  unalterable "$policy" "FEDKACE_POLICY, what this machine accepts"
  policy=$(realpath "$policy")
  unquoted FEDKACE_POLICY "$policy"
fi
mkdir -p "$state" 2>/dev/null || die "FEDKACE_STATE = $state: cannot be created"
[[ -w $state ]] || die "FEDKACE_STATE = $state: $(id -un) cannot write there"
free_port 127.0.0.1 "$port" FEDKACE_RUNTIME_PORT
settings="client-name=\"$node\" state-dir=\"$state\""
if [[ -n $inbox ]]; then settings+=" inbox=\"$inbox\""; fi
if [[ -n $models ]]; then settings+=" models-dir=\"$models\""; fi
if [[ -n $policy ]]; then settings+=" policy=\"$policy\""; fi
if [[ -n $more ]]; then settings+=" $more"; fi
options=()
if [[ -n $trusted ]]; then options+=(--trusted-entities "$trusted"); fi
quiet_flower
through_proxy "${superlink%:*}"
exec python3 "$(dirname "${BASH_SOURCE[0]}")/supernode.py" --superlink "$superlink" --root-certificates "$ca" --auth-supernode-private-key "$key" \
  --host 127.0.0.1 --port "$port" --node-config "$settings" ${options[@]+"${options[@]}"}
