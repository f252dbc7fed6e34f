"""Certificates of machines, passphrases and ends: ``certificates.sh`` and what ``supernode.sh`` makes of them."""

import contextlib
import datetime
import os
import pty
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support.systems.federation import DEPLOY, environment, good, refused, script
from support.systems.proxy import Authority
from support.tools import need_tools

from fedkace_flwr.experiments.running.ports import free_ports

PASSPHRASE = "correct horse battery staple"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    need_tools("openssl", "ssh-keygen")
    return environment(tmp_path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def days_of(path: Path) -> int:
    return (read(path).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days + 1


def test_a_machines_certificate_is_for_its_own_key_and_for_nothing_but_clients(authority: Authority) -> None:
    certificate = read(authority.certificate("edge-1"))
    public = load_ssh_public_key(Path(f"{authority.key('edge-1')}.pub").read_bytes())
    assert certificate.public_key() == public
    certificate.verify_directly_issued_by(read(authority.folder / "ca.crt"))
    use = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(use) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == "edge-1"
    use = read(authority.folder / "superlink.crt").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(use) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_certificates_end_after_a_year_and_the_authority_after_five(authority: Authority) -> None:
    names = ("nodes/edge-1.crt", "superlink.crt", "ca.crt")
    authority.certificate("edge-1")
    assert [days_of(authority.folder / name) for name in names] == [397, 397, 1825]


def test_a_renewed_certificate_keeps_the_key_and_nothing_is_overwritten_without_the_option(
    authority: Authority, env: dict[str, str]
) -> None:
    path = authority.certificate("edge-2")
    before, key = read(path), f"{authority.key('edge-2')}.pub"
    said = refused("certificates.sh", "node", authority.folder, key, env=env)
    assert f"{path} already exists; --renew replaces it" in said
    good("certificates.sh", "node", authority.folder, "--renew", "--days", "20", key, env=env)
    after = read(path)
    assert after.public_key() == before.public_key() and after.serial_number != before.serial_number
    done = script("certificates.sh", "show", authority.folder, env=env)
    assert f"{path}\n" in done.stdout and done.stdout.count("expires within 30 days") == 1
    assert done.returncode == 1, "for cron"
    good("certificates.sh", "node", authority.folder, "--renew", key, env=env)
    good("certificates.sh", "show", authority.folder, env=env)


def test_a_file_that_an_interrupted_command_has_left_is_named_and_the_rest_can_be_made(
    env: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "ca.key").touch()
    assert f"{folder}/ca.key already exists" in refused("certificates.sh", "ca", folder, env=env)
    (folder / "ca.key").unlink()
    good("certificates.sh", "ca", folder, env=env)
    assert f"{folder}/ca.crt\n" in good("certificates.sh", "show", folder, env=env), "the authority alone"
    made = good("certificates.sh", "superlink", folder, "hub", env=env).split()
    assert [Path(file).name for file in made] == ["superexec.secret", "superlink.key", "superlink.crt"]
    (folder / "superlink.crt").unlink()
    said = refused("certificates.sh", "superlink", folder, "hub", env=env)
    assert f"{folder}/superlink.key already exists; --renew" in said
    good("certificates.sh", "superlink", folder, "--renew", "hub", env=env)


def test_a_key_that_is_none_and_two_keys_of_one_name_are_refused_before_anything_is_made(
    authority: Authority, env: dict[str, str], tmp_path: Path
) -> None:
    good("node-key.sh", tmp_path / "new", "edge-9", env=env)
    good("node-key.sh", tmp_path / "twin", "edge-9", env=env)
    new, twin = tmp_path / "new.pub", tmp_path / "twin.pub"
    assert "also has the name edge-9" in refused("certificates.sh", "node", authority.folder, new, twin, env=env)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    other = tmp_path / "other.pub"
    said = refused("certificates.sh", "node", authority.folder, new, other, env=env)
    assert f"{other} is not a 384-bit ECDSA public key" in said
    text = new.read_text().replace("edge-9", "../edge")
    (tmp_path / "path.pub").write_text(text)
    said = refused("certificates.sh", "node", authority.folder, tmp_path / "path.pub", env=env)
    assert "'../edge': must be 1 to 64 letters" in said
    assert not (authority.folder / "nodes" / "edge-9.crt").exists()


@pytest.mark.slow
def test_the_authoritys_key_can_be_encrypted(env: dict[str, str], tmp_path: Path) -> None:
    folder, secret = tmp_path / "ca", tmp_path / "passphrase"
    secret.write_text(f"{PASSPHRASE}\nsecond line\n")
    assert "has mode 644" in refused("certificates.sh", "ca", folder, "--passphrase-file", secret, env=env)
    secret.chmod(0o600)
    good("certificates.sh", "ca", folder, "--passphrase-file", secret, env=env)
    pem = (folder / "ca.key").read_bytes()
    with pytest.raises(TypeError, match="not given"):
        load_pem_private_key(pem, None)
    assert load_pem_private_key(pem, PASSPHRASE.encode()).public_key() == read(folder / "ca.crt").public_key()
    assert "is encrypted; use --passphrase-file" in refused("certificates.sh", "superlink", folder, "hub", env=env)
    wrong = tmp_path / "wrong"
    wrong.write_text("something else\n")
    wrong.chmod(0o600)
    said = refused("certificates.sh", "superlink", folder, "--passphrase-file", wrong, "hub", env=env)
    assert "the passphrase is wrong" in said and not (folder / "superlink.key").exists()
    good("certificates.sh", "superlink", folder, "--passphrase-file", secret, "hub", env=env)
    good("node-key.sh", tmp_path / "key", "edge-1", env=env)
    good("certificates.sh", "node", folder, "--passphrase-file", secret, tmp_path / "key.pub", env=env)
    read(folder / "nodes" / "edge-1.crt").verify_directly_issued_by(read(folder / "ca.crt"))


def test_a_short_passphrase_and_one_for_a_key_without_are_refused(
    authority: Authority, env: dict[str, str], tmp_path: Path
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("eleven char\n")
    secret.chmod(0o600)
    said = refused("certificates.sh", "ca", tmp_path / "ca", "--passphrase-file", secret, env=env)
    assert "has 11 characters: must have at least 12" in said and not (tmp_path / "ca" / "ca.key").exists()
    said = refused(
        "certificates.sh", "superlink", authority.folder, "--renew", "--passphrase-file", secret, "a", env=env
    )
    assert f"{authority.folder}/ca.key is not encrypted" in said
    assert "no terminal" in refused("certificates.sh", "ca", tmp_path / "ca", "--passphrase", env=env)


def typed(command: list[str], env: dict[str, str], *answers: tuple[str, str]) -> tuple[int, str]:
    """Run a command at a terminal and type an answer after each prompt; its exit code and what it says last."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = ""
    for prompt, answer in answers:
        while prompt not in said:
            said += os.read(ours, 1000).decode()
        said = ""
        os.write(ours, f"{answer}\n".encode())
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while block := os.read(ours, 1000):
            said += block.decode()
    os.close(ours)
    return process.wait(), said


@pytest.mark.slow
def test_a_passphrase_can_be_typed(env: dict[str, str], tmp_path: Path) -> None:
    ca = [str(DEPLOY / "certificates.sh"), "ca", str(tmp_path / "ca"), "--passphrase"]
    code, said = typed(ca, env, ("ca.key: ", PASSPHRASE), ("Again: ", "something else"))
    assert code == 2 and "the passphrases differ" in said
    code, said = typed(ca, env, ("ca.key: ", PASSPHRASE), ("Again: ", PASSPHRASE))
    assert code == 0 and PASSPHRASE not in said
    superlink = [str(DEPLOY / "certificates.sh"), "superlink", str(tmp_path / "ca"), "hub"]
    assert typed(superlink, env, ("ca.key: ", PASSPHRASE))[0] == 0


def settings(authority: Authority, name: str, folder: Path) -> dict[str, str]:
    return {
        "FEDKACE_SUPERLINK": f"localhost:{free_ports(1)[0]}",
        "FEDKACE_CA": str(authority.folder / "ca.crt"),
        "FEDKACE_KEY": str(authority.key(name)),
        "FEDKACE_CERTIFICATE": str(authority.certificate(name)),
        "FEDKACE_NODE": name,
        "FEDKACE_STATE": str(folder / "state"),
    }


def test_a_supernode_refuses_a_certificate_that_nginx_would_refuse(
    authority: Authority, env: dict[str, str], tmp_path: Path
) -> None:
    right = settings(authority, "edge-1", tmp_path)
    said = refused("supernode.sh", env={**env, **right, "FEDKACE_CERTIFICATE": str(authority.certificate("edge-3"))})
    assert f"edge-3.crt: belongs to another key than FEDKACE_KEY = {authority.key('edge-1')}" in said
    of_superlink = str(authority.folder / "superlink.crt")
    said = refused("supernode.sh", env={**env, **right, "FEDKACE_CERTIFICATE": of_superlink})
    assert f"FEDKACE_CERTIFICATE = {of_superlink}: is not a certificate for a SuperNode" in said
    said = refused("supernode.sh", env={**env, **right, "FEDKACE_CERTIFICATE": "/nowhere"})
    assert "/nowhere (FEDKACE_CERTIFICATE, this machine's certificate) does not exist" in said
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    said = refused("supernode.sh", env={**env, **right, "FEDKACE_CERTIFICATE": str(other.certificate("edge-1"))})
    assert "is not a certificate for a SuperNode" in said and str(authority.folder / "ca.crt") in said


def test_a_certificate_that_soon_ends_is_warned_about(
    authority: Authority, env: dict[str, str], tmp_path: Path
) -> None:
    right = settings(authority, "edge-7", tmp_path)
    key = f"{authority.key('edge-7')}.pub"
    good("certificates.sh", "node", authority.folder, "--renew", "--days", "29", key, env=env)
    done = script("supernode.sh", env={**env, **right, "FEDKACE_STATE": "/proc/none"})  # ends before Flower starts
    soon, error = done.stderr.splitlines()
    assert error.startswith("error: FEDKACE_STATE = /proc/none")
    assert done.returncode == 2 and soon.startswith("warning: ") and "expires within 30 days" in soon
