"""Signatures of apps: made by ``sign-app.py``, passed on by ``superlink.py``, verified by Flower's SuperNode.

``tests/system/test_hub.py`` shows what real SuperNodes do with unsigned and signed apps.
"""

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supernode.cli.flower_supernode import _try_obtain_trusted_entities, _validate_public_keys_ed25519
from flwr.supernode.start_client_internal import _verify_fab
from support.systems.federation import environment, script
from support.systems.proxy import Authority, deployed

from fedkace_flwr.experiments.running.processes import staged_app

PASSPHRASE = "correct horse battery staple"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return staged_app(tmp_path_factory.mktemp("app") / "app")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``sign-app.py`` in this process, without a terminal."""
    program = deployed("sign-app")

    def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
        monkeypatch.setattr(sys, "argv", ["sign-app.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        code = 0
        try:
            program.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return subprocess.CompletedProcess([], code, *capsys.readouterr())

    return command


def must(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def trusted_by(folder: Path, *lines: str) -> dict[str, str]:
    """Return a list of trusted keys as a SuperNode reads it."""
    path = folder / "trusted.yaml"
    path.write_text("".join(f"{line}\n" for line in lines))
    read = _try_obtain_trusted_entities(path)
    assert read is not None
    _validate_public_keys_ed25519(read)
    return read


def accepted(app: Path, signatures: Path, trusted: dict[str, str]) -> bool:
    """Return what Flower's SuperNode says of an app as ``superlink.py`` sends it."""
    content = build_fab_from_disk(app)
    digest = hashlib.sha256(content).hexdigest()
    sent = deployed("superlink").signatures_of(signatures, digest)
    assert not sent or sent["valid_license"], "a SuperNode refuses all signatures without this entry"
    return _verify_fab(Fab(digest, content, sent), trusted)


@pytest.mark.slow
def test_a_supernode_accepts_what_a_trusted_key_has_signed_and_nothing_else(
    app: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "signatures"
    folder.mkdir()
    lines = [must(run("key", tmp_path / name, name, "--no-passphrase")) for name in ("releases", "stranger")]
    trusted = trusted_by(tmp_path, lines[0])
    assert not accepted(app, folder, trusted), "not signed"
    must(run("sign", tmp_path / "stranger", app, folder))
    assert not accepted(app, folder, trusted), "signed with a key that is not trusted"
    assert accepted(app, folder, trusted_by(tmp_path, *lines))

    (path,) = folder.iterdir()
    forged = folder / path.name.replace("stranger", "releases")
    forged.write_text(path.read_text().replace('"stranger"', '"releases"'))
    assert not accepted(app, folder, trusted), "signed with another key under a trusted name"
    assert must(run("sign", tmp_path / "releases", app, folder)) == str(forged)
    assert accepted(app, folder, trusted)

    record = json.loads(forged.read_text())
    forged.write_text(json.dumps({**record, "signed_at": record["signed_at"] + 1}))
    assert not accepted(app, folder, trusted), "the time is signed, too"
    forged.write_text(json.dumps(record))
    changed = staged_app(tmp_path / "changed")
    assert accepted(changed, folder, trusted), "the same files elsewhere are the same app"
    with (changed / "clients" / "base.py").open("a") as file:
        file.write("\n")
    assert not accepted(changed, folder, trusted), "another app"
    for other in folder.iterdir():
        digest = must(run("show", changed))
        other.rename(other.with_name(other.name.replace(record["app"], digest)))
    assert not accepted(changed, folder, trusted), "another app, with the first one's signatures"


@pytest.mark.matrix
@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        '{"public_key_id": "a"}',
        '{"public_key_id": 1, "signature": "AAAA", "signed_at": 1}',
        '{"public_key_id": "a", "signature": 1, "signed_at": 1}',
        '{"public_key_id": "a", "signature": "AAAA", "signed_at": true}',
        '{"public_key_id": "a", "signature": "AAAA", "signed_at": -1}',
        '{"public_key_id": "a", "signature": "' + "A" * 10**4 + '", "signed_at": 1}',
        "[" * 9000,
    ],
)
def test_a_file_that_is_no_signature_is_left_out_and_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "abc.bad.json").write_text(text)
    (tmp_path / "abc.good.json").write_text('{"public_key_id": "good", "signature": "AAAA", "signed_at": 5}')
    (tmp_path / "def.other.json").write_text('{"public_key_id": "other", "signature": "AAAA", "signed_at": 5}')
    found = deployed("superlink").signatures_of(tmp_path, "abc")
    assert found == {"good": '{"signature": "AAAA", "signed_at": 5}', "valid_license": "Valid"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/abc.bad.json: not a signature, left out")


@pytest.mark.slow
def test_a_key_has_a_passphrase_unless_told_otherwise_and_is_never_overwritten(
    app: Path, run: Run, tmp_path: Path
) -> None:
    key, secret = tmp_path / "key", tmp_path / "passphrase"
    assert "no terminal to type its passphrase" in refused(run("key", key, "releases"))
    nowhere = tmp_path / "none" / "key"
    assert f"{nowhere.parent} (the folder of the key) does not exist" in refused(run("key", nowhere, "releases"))
    secret.write_text("eleven char\n")
    assert "others can read it" in refused(run("key", key, "releases", "--passphrase-file", secret))
    secret.chmod(0o600)
    assert "has 11 characters" in refused(run("key", key, "releases", "--passphrase-file", secret))
    assert not key.exists()
    secret.write_text(f"{PASSPHRASE}\n")
    must(run("key", key, "releases", "--passphrase-file", secret))
    assert key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError, match="not given"):
        load_pem_private_key(key.read_bytes(), None)
    assert "never overwritten" in refused(run("key", key, "releases", "--no-passphrase"))
    assert "no terminal" in refused(run("sign", key, app, tmp_path))
    must(run("sign", key, app, tmp_path, "--passphrase-file", secret))
    secret.write_text("something else\n")
    assert "the passphrase is wrong" in refused(run("sign", key, app, tmp_path, "--passphrase-file", secret))
    key.chmod(0o640)
    assert "others can read it" in refused(run("sign", key, app, tmp_path, "--passphrase-file", secret))
    assert "does not exist" in refused(run("sign", tmp_path / "none", app, tmp_path / "none"))
    assert "is not a Flower app" in refused(run("show", tmp_path))
    assert "'../x': must be 1 to 64 letters" in refused(run("key", tmp_path / "other", "../x"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a SuperNode that lacks nothing."""
    folder = tmp_path_factory.mktemp("authority")
    authority = Authority(folder)
    return {
        **environment(folder),
        "FEDKACE_SUPERLINK": "localhost:1",
        "FEDKACE_CA": str(authority.folder / "ca.crt"),
        "FEDKACE_KEY": str(authority.key("edge-1")),
        "FEDKACE_NODE": "edge-1",
        "FEDKACE_STATE": str(folder / "state"),
    }


def test_a_list_without_keys_which_would_trust_everyone_is_refused(settings: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "trusted.yaml"
    for text in ("{}\n", "# releases: ssh-ed25519 AAAA\n", ""):
        path.write_text(text)
        said = refused(script("supernode.sh", env={**settings, "FEDKACE_TRUSTED": str(path)}))
        assert f"FEDKACE_TRUSTED = {path}: contains no line NAME: ssh-ed25519 KEY" in said


@pytest.mark.parametrize("name", ["FEDKACE_TRUSTED", "FEDKACE_POLICY"])
def test_files_that_protect_a_site_must_be_there_and_its_own(
    name: str, settings: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    said = refused(script("supernode.sh", env={**settings, name: str(path)}))
    assert f"{path} ({name}, " in said and "does not exist" in said
    path.write_text("")
    path.chmod(0o664)
    assert "has mode 664, so others can change it" in refused(script("supernode.sh", env={**settings, name: str(path)}))
