#!/usr/bin/env python3
"""Sign the app that `flwr run` sends to SuperNodes, for those that accept only signed apps (docs/signed-apps.md).

It builds the app, and composes the message to be signed, with functions that Flower does not declare public.
"""

import argparse
import base64
import getpass
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SHORTEST = 12  # characters of a passphrase
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def stop(text: str) -> NoReturn:
    """Print one line and exit with code 2."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


def passphrase_for(key: Path, file: Path | None, *, new: bool) -> bytes:
    """Return the passphrase from a private file, or as typed."""
    if file is not None:
        if not file.is_file():
            stop(f"{file} (--passphrase-file) does not exist")
        if file.stat().st_mode & 0o077:
            stop(f"{file} (--passphrase-file): others can read it; run chmod 600 {file}")
        typed = (file.read_text(encoding="utf-8").splitlines() or [""])[0]
    elif sys.stdin.isatty():
        typed = getpass.getpass(f"Passphrase for {key}: ")
        if new and typed != getpass.getpass("Again: "):
            stop("the passphrases differ")
    else:
        stop(f"{key}: there is no terminal to type its passphrase; use --passphrase-file FILE")
    if new and len(typed) < SHORTEST:
        stop(f"the passphrase of {key} has {len(typed)} characters: must have at least {SHORTEST}")
    return typed.encode()


def make_key(arguments: argparse.Namespace) -> None:
    """Create FILE and FILE.pub, and print the line for the sites' lists of trusted keys."""
    file, name = arguments.key, arguments.name
    if not NAME.fullmatch(name):
        stop(f"NAME = '{name}': must be 1 to 64 letters, digits, dots, dashes or underscores")
    public = file.with_name(f"{file.name}.pub")
    if file.exists() or public.exists():
        stop(f"{file} already exists; sites trust it, so it is never overwritten")
    if not file.parent.is_dir():
        stop(f"{file.parent} (the folder of the key) does not exist")
    how: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if not arguments.no_passphrase:
        how = serialization.BestAvailableEncryption(passphrase_for(file, arguments.passphrase_file, new=True))
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as private:
        private.write(pem)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    public.write_text(f"{line} {name}\n", encoding="utf-8")
    print(f"{name}: {line}")


def read_key(file: Path, passphrase_file: Path | None) -> Ed25519PrivateKey:
    """Return the private key, for which a passphrase is asked if it has one."""
    if not file.is_file():
        stop(f"{file} (the key) does not exist")
    if file.stat().st_mode & 0o077:
        stop(f"{file} (the key): others can read it; run chmod 600 {file}")
    pem = file.read_bytes()
    given = passphrase_for(file, passphrase_file, new=False) if b"ENCRYPTED" in pem else None
    try:
        key = serialization.load_pem_private_key(pem, given)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        stop(f"{file}: {'the passphrase is wrong' if given is not None else 'is not a key of sign-app.py'}")
    if not isinstance(key, Ed25519PrivateKey):
        stop(f"{file}: is not an Ed25519 key")
    return key


def name_of(file: Path) -> str:
    """Return the name in FILE.pub."""
    public = file.with_name(f"{file.name}.pub")
    parts = public.read_text(encoding="utf-8").split() if public.is_file() else []
    if len(parts) != 3 or parts[0] != "ssh-ed25519" or not NAME.fullmatch(parts[2]):
        stop(f"{public}: must contain one line, ssh-ed25519 KEY NAME")
    return parts[2]


def digest_of(app: Path) -> bytes:
    """Return the SHA-256 of the app as `flwr run` builds it."""
    from flwr.cli.build import build_fab_from_disk  # takes a second

    try:
        return hashlib.sha256(build_fab_from_disk(app)).digest()
    except (OSError, ValueError) as error:
        stop(f"{app}: is not a Flower app ({error})")


def sign(arguments: argparse.Namespace) -> None:
    """Build the app as `flwr run` does, and write its signature to FOLDER/HASH.NAME.json."""
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

    folder = arguments.folder
    if not folder.is_dir():
        stop(f"{folder} (the folder of signatures) does not exist")
    name, key = name_of(arguments.key), read_key(arguments.key, arguments.passphrase_file)
    digest, now = digest_of(arguments.app), int(time.time())
    signature = key.sign(create_message_to_sign(digest, now))
    record = {
        "app": digest.hex(),
        "public_key_id": name,
        "signature": base64.urlsafe_b64encode(signature).rstrip(b"=").decode(),
        "signed_at": now,
    }
    path = folder / f"{digest.hex()}.{name}.json"
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.chmod(0o644)
    partial.replace(path)
    print(path)


def show(arguments: argparse.Namespace) -> None:
    """Print the hash of the app that `flwr run` would send."""
    print(digest_of(arguments.app).hex())


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="sign-app.py", description=(__doc__ or "").partition("\n")[0])
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    task = tasks.add_parser("key", help=make_key.__doc__)
    task.add_argument("key", type=Path, metavar="FILE")
    task.add_argument("name", metavar="NAME", help="of the one who signs")
    task.add_argument("--passphrase-file", type=Path, metavar="FILE", help="its first line; by default it is typed")
    task.add_argument("--no-passphrase", action="store_true", help="do not encrypt the key")
    task.set_defaults(run=make_key)
    task = tasks.add_parser("sign", help=sign.__doc__)
    task.add_argument("key", type=Path, metavar="KEY")
    task.add_argument("app", type=Path, metavar="APP", help="folder of the app's pyproject.toml")
    task.add_argument("folder", type=Path, metavar="FOLDER", help="FEDKACE_SIGNATURES of superlink.sh")
    task.add_argument("--passphrase-file", type=Path, metavar="FILE", help="its first line; by default it is typed")
    task.set_defaults(run=sign)
    task = tasks.add_parser("show", help=show.__doc__)
    task.add_argument("app", type=Path, metavar="APP")
    task.set_defaults(run=show)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
