"""The scripts of ``deploy/`` that make certificates, keys and settings; no federation runs here."""

import json
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import yaml
from cryptography import x509
from support.systems.federation import DEPLOY, ROOT, environment, good, refused
from support.tools import need_tools


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_tools("openssl")
    folder = tmp_path_factory.mktemp("made")
    env = environment(folder)
    good("certificates.sh", "ca", folder / "made", env=env)
    good("certificates.sh", "superlink", folder / "made", "fed.example.org", "10.0.0.5", "fd00::5", env=env)
    return folder / "made"


@pytest.fixture
def certificates(made: Path, tmp_path: Path) -> Path:
    """A copy of the authority's and the SuperLink's certificates."""
    return Path(shutil.copytree(made, tmp_path / "certificates"))


def test_the_certificate_names_every_name_and_address_and_private_files_are_private(certificates: Path) -> None:
    certificate = x509.load_pem_x509_certificate((certificates / "superlink.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "10.0.0.5", "fd00::5"]
    authority = x509.load_pem_x509_certificate((certificates / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    for name in ("ca.key", "superlink.key", "superexec.secret"):
        assert mode(certificates / name) == 0o600
    assert {path.name for path in certificates.iterdir()} == {
        *("ca.key", "ca.crt", "superlink.key", "superlink.crt", "superexec.secret")
    }


def test_the_certificate_stands_up_to_the_strictest_check_of_python(certificates: Path) -> None:
    """Python 3.13 asks for more by default than versions before it."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates / "superlink.crt", certificates / "superlink.key")
    for name in ("fed.example.org", "10.0.0.5", "fd00::5", "localhost"):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            context.wrap_bio(to_client, to_server, server_hostname=name),
            server.wrap_bio(to_server, to_client, server_side=True),
        ]
        while ends:
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass


def test_nothing_is_overwritten_and_a_renewed_certificate_keeps_its_key(
    certificates: Path, env: dict[str, str], tmp_path: Path
) -> None:
    need_tools("ssh-keygen")
    before = {path: path.read_bytes() for path in certificates.iterdir()}
    assert "already exists" in refused("certificates.sh", "ca", certificates, env=env)
    assert "--renew" in refused("certificates.sh", "superlink", certificates, "10.0.0.6", env=env)
    good("node-key.sh", tmp_path / "key", "edge-1", env=env)
    key = (tmp_path / "key").read_bytes()
    assert mode(tmp_path / "key") == 0o600
    assert "never overwritten" in refused("node-key.sh", tmp_path / "key", env=env)
    assert (tmp_path / "key").read_bytes() == key
    assert {path: path.read_bytes() for path in certificates.iterdir()} == before
    good("certificates.sh", "superlink", certificates, "--renew", "10.0.0.6", env=env)
    changed = {path.name for path in certificates.iterdir() if path.read_bytes() != before[path]}
    assert changed == {"superlink.crt"}


def test_a_name_that_is_none_is_refused(certificates: Path, env: dict[str, str]) -> None:
    for name in ("bad name", "a.org:443", "-x", "a..b", "x,DNS:evil.org"):
        assert name in refused("certificates.sh", "superlink", certificates, "--renew", name, env=env)


def settings_of(certificates: Path, tmp_path: Path, env: dict[str, str]) -> dict[str, str]:
    need_tools("ssh-keygen")
    good("node-key.sh", tmp_path / "key", "edge-1", env=env)
    return {
        "FEDKACE_SUPERLINK": "127.0.0.1:1",
        "FEDKACE_CA": str(certificates / "ca.crt"),
        "FEDKACE_KEY": str(tmp_path / "key"),
        "FEDKACE_NODE": "edge-1",
        "FEDKACE_STATE": str(tmp_path / "state"),
    }


def test_a_supernode_with_a_wrong_setting_names_it(certificates: Path, tmp_path: Path, env: dict[str, str]) -> None:
    settings = settings_of(certificates, tmp_path, env)
    for key, value, words in (
        ("FEDKACE_CA", "", "FEDKACE_CA is not set: it must name the authority's certificate"),
        ("FEDKACE_CA", "/nowhere", "/nowhere (FEDKACE_CA, the authority's certificate) does not exist"),
        ("FEDKACE_NODE", "../x", "FEDKACE_NODE = '../x': must be 1 to 64 letters"),
        ("FEDKACE_RUNTIME_PORT", "two", "FEDKACE_RUNTIME_PORT = 'two': must be a whole number"),
        ("FEDKACE_SUPERLINK", "hub", "FEDKACE_SUPERLINK = 'hub': must be HOST:PORT"),
        ("FEDKACE_INBOX", '/a" x="1', "must not contain quotes"),
        ("FEDKACE_STATE", "/proc/none", "FEDKACE_STATE = /proc/none: cannot be created"),
        ("FEDKACE_MODELS", "/none", "FEDKACE_MODELS = /none: must be a folder in which"),
    ):
        assert words in refused("supernode.sh", env={**env, **settings, key: value})


def test_an_expired_certificate_and_a_key_that_others_can_read_are_named(
    certificates: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    settings = settings_of(certificates, tmp_path, env)
    (tmp_path / "key").chmod(0o640)
    said = refused("supernode.sh", env={**env, **settings})
    assert f"{tmp_path}/key (FEDKACE_KEY, this machine's key) has mode 640" in said
    (tmp_path / "key").chmod(0o600)
    old = tmp_path / "old.crt"
    request, key = str(tmp_path / "request"), str(certificates / "ca.key")
    command = ["openssl", "req", "-new", "-key", key, "-subj", "/CN=old", "-out", request]
    subprocess.run(command, check=True, capture_output=True)
    command = ["openssl", "x509", "-req", "-in", request, "-signkey", key, "-days", "-1", "-out", str(old)]
    subprocess.run(command, check=True, capture_output=True)
    said = refused("supernode.sh", env={**env, **settings, "FEDKACE_CA": str(old)})
    assert f"{old} (FEDKACE_CA, the authority's certificate) has expired" in said
    shutil.copy(old, certificates / "superlink.crt")
    links = {"FEDKACE_CERTIFICATES": str(certificates), "FEDKACE_DATABASE": str(tmp_path / "db")}
    assert "has expired" in refused("superlink.sh", env={**env, **links})


def test_a_missing_program_is_named(tmp_path: Path, env: dict[str, str]) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "id", "cat", "stat", "mkdir", "hostname", "realpath"):
        (tools / name).symlink_to(str(shutil.which(name)))
    poor = {**env, "PATH": str(tools)}
    assert "openssl is not installed" in refused("certificates.sh", "ca", tmp_path / "new", env=poor)
    assert "ssh-keygen is not installed" in refused("node-key.sh", tmp_path / "key", env=poor)
    assert "flwr is not installed" in refused("federation.sh", "setup", tmp_path / "f", env=poor)
    assert not (tmp_path / "new").exists() and not (tmp_path / "f").exists()


def test_the_connection_is_added_and_everything_else_stays(
    certificates: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    file = tmp_path / "flwr" / "config.toml"
    file.parent.mkdir()
    mine = '# mine\n[superlink]\ndefault = "lab"   # the lab\n\n[superlink.lab]\naddress = "lab:1"\ninsecure = true\n'
    file.write_text(mine)
    file.chmod(0o640)
    ca = certificates / "ca.crt"
    good("connection.sh", "fedkace", "hub:9092", ca, env=env)
    assert file.read_text().startswith(mine) and mode(file) == 0o640
    entry = {"address": "hub:9092", "root-certificates": str(ca)}
    assert tomllib.loads(file.read_text())["superlink"]["fedkace"] == entry
    before = file.read_bytes()
    assert "already" in good("connection.sh", "fedkace", "hub:9092", ca, env=env)
    assert "already has superlink.fedkace (hub:9092)" in refused("connection.sh", "fedkace", "x:1", ca, env=env)
    assert file.read_bytes() == before
    with file.open("a") as more:
        more.write("\n[superlink.after]\naddress = 'z:9'\n")
    good("connection.sh", "fedkace", "x:1", ca, "--replace", env=env)
    links = tomllib.loads(file.read_text())["superlink"]
    assert (
        links["fedkace"]["address"] == "x:1"
        and links["after"] == {"address": "z:9"}
        and "# the lab" in file.read_text()
    )


def test_a_broken_or_unusual_configuration_is_left_alone(certificates: Path, env: dict[str, str]) -> None:
    file = Path(env["FLWR_HOME"]) / "config.toml"
    file.parent.mkdir()
    for text, words in (("[superlink\n", "is not valid TOML"), ("superlink = {lab = {address = 'a:1'}}\n", "by hand")):
        file.write_text(text)
        assert words in refused("connection.sh", "fedkace", "hub:9092", certificates / "ca.crt", env=env)
        assert file.read_text() == text


def test_a_federation_whose_connection_has_another_s_name_is_refused_before_any_file_is_made(
    tmp_path: Path, env: dict[str, str]
) -> None:
    file, folder = Path(env["FLWR_HOME"]) / "config.toml", tmp_path / "federation"
    file.parent.mkdir()
    mine = '[superlink.fedkace]\naddress = "hub:9092"\n'
    for text, words in ((mine, "already has superlink.fedkace (hub:9092)"), ("[superlink\n", "is not valid TOML")):
        file.write_text(text)
        said = refused("federation.sh", "setup", folder, env=env)
        assert str(file) in said and words in said and "--replace" not in said
        assert file.read_text() == text and not folder.exists()
    assert "--connection = 'a b': must be" in refused("federation.sh", "setup", folder, "--connection", "a b", env=env)
    file.write_text(mine)
    assert "with --connection NAME" in refused("federation.sh", "setup", folder, env=env)
    assert not folder.exists()


def test_a_federation_is_not_set_up_among_a_users_files(tmp_path: Path, env: dict[str, str]) -> None:
    mine = tmp_path / "superlink" / "env"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert "holds files that no setup has written" in refused("federation.sh", "setup", tmp_path, env=env)
    assert mine.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["superlink"]


def test_a_federation_with_inboxes_has_the_folders_for_new_files(tmp_path: Path, env: dict[str, str]) -> None:
    need_tools("openssl", "ssh-keygen")
    file, folder = Path(env["FLWR_HOME"]) / "config.toml", tmp_path / "federation"
    file.parent.mkdir()
    file.write_text('[superlink.fedkace]\naddress = "hub:9092"\n')
    options = ("--nodes", 2, "--port", 0, "--connection", "mine")
    good("federation.sh", "setup", folder, *options, "--inboxes", env=env)
    for number in (1, 2):
        inbox = folder / f"node-{number}" / "inbox"
        assert f"FEDKACE_INBOX='{inbox}'" in (inbox.parent / "env").read_text()
        assert (inbox / "new").is_dir()
        assert {mode(path) for path in (folder, inbox.parent, inbox, inbox / "new")} == {0o700}
    good("federation.sh", "setup", tmp_path / "plain", *options[:-1], "plain", env=env)
    assert not (tmp_path / "plain" / "node-1" / "inbox").exists()


def test_a_key_that_the_app_does_not_declare_is_refused_before_a_run_is_disturbed(
    tmp_path: Path, env: dict[str, str]
) -> None:
    need_tools("openssl", "ssh-keygen")
    folder = tmp_path / "federation"
    good("federation.sh", "setup", folder, "--nodes", 1, "--port", 0, "--connection", "mine", env=env)
    good("federation.sh", "service", folder, DEPLOY.parent, "rounds=3", env=env)
    before = (folder / "run" / "config.toml").read_text()
    assert "declares no key roundss" in refused("federation.sh", "service", folder, DEPLOY.parent, "roundss=4", env=env)
    assert (folder / "run" / "config.toml").read_text() == before


@pytest.fixture
def services() -> dict[str, Any]:
    """The services of the compose file."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def secrets_of(service: dict[str, Any]) -> dict[str, str]:
    """The secrets of a service, and where it finds them."""
    given = service.get("secrets", [])
    named = {each: f"/run/secrets/{each}" for each in given if isinstance(each, str)}
    return named | {each["source"]: each["target"] for each in given if isinstance(each, dict)}


def test_the_compose_file_mounts_every_secret_that_it_names_and_contains_none(services: dict[str, Any]) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in services.items():
        assert secrets_of(service).keys() <= set(compose["secrets"]), name
        paths = {value for value in service.get("environment", {}).values() if value.startswith("/run/secrets/")}
        assert paths <= set(secrets_of(service).values()), name
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["restart"] == "always"
        assert service["mem_limit"], name
        assert name in ("hub", "nginx") or (DEPLOY / service["command"][0]).exists()
    assert secrets_of(services["superlink"]).keys() == {
        *("ca.crt", "superlink.crt", "superlink.key", "superexec.secret")
    }
    assert all(secret["file"].startswith("secrets/") for secret in compose["secrets"].values())
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_nodes_in_containers_reach_the_superlink_through_nginx_alone(services: dict[str, Any]) -> None:
    """The SuperLink listens on a loopback that only nginx and the SuperExec share; none of them takes it along."""
    assert "FEDKACE_HOST" not in services["superlink"]["environment"]
    shared = {name for name, service in services.items() if service.get("network_mode") == "service:hub"}
    assert shared == {"superlink", "nginx", "superexec"} and services["hub"]["command"] == ["sleep", "infinity"]
    nodes = {name: service for name, service in services.items() if name.startswith("node-")}
    assert len(nodes) == 2
    for name, service in nodes.items():
        told = service["environment"]
        assert told["FEDKACE_SUPERLINK"] == "superlink:9093", "nginx's port"
        assert told["FEDKACE_CERTIFICATE"] == f"/run/secrets/{name}.crt"
        assert service["networks"] == [name] and services["hub"]["networks"][name] == {"aliases": ["superlink"]}
    assert "listen 9093 ssl;" in (DEPLOY / "nginx.conf").read_text()
    assert not any("ports" in service for service in services.values())
    installed = set(re.findall(r"/etc/fedkace/certificates/[\w.]+", (DEPLOY / "nginx.conf").read_text()))
    assert installed == set(secrets_of(services["nginx"]).values())


def test_the_units_call_scripts_that_exist_and_restart_them() -> None:
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    names = ("run", "serve", "superexec", "superlink", "supernode")
    assert [unit.name for unit in units] == [f"fedkace-{name}.service" for name in names]
    for unit in units:
        lines = unit.read_text().splitlines()
        (start,) = [line for line in lines if line.startswith("ExecStart=")]
        assert (
            "-m fedkace_flwr.inference.predict serve" in start or (DEPLOY / Path(start.partition("=")[2]).name).exists()
        )
        assert any(re.fullmatch(r"MemoryMax=\d+(G|%)", line) for line in lines), (
            "a flood ends the unit, not the machine"
        )
        # A run that was stopped on purpose is not started again.
        assert f"Restart={'on-failure' if unit.name == 'fedkace-run.service' else 'always'}" in lines
        assert "UMask=0077" in lines


def test_the_prediction_service_has_nothing_of_the_supernode_but_its_models() -> None:
    lines = (DEPLOY / "systemd" / "fedkace-serve.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    node = (DEPLOY / "systemd" / "fedkace-supernode.service").read_text()
    assert settings["User"] == settings["Group"] == "fedkace-serve" and "User=fedkace\n" in node
    assert settings["EnvironmentFile"] == "/etc/fedkace/serve.env" and "supernode.env" not in "".join(lines)
    assert settings["InaccessiblePaths"].split() == [
        "-/etc/fedkace",
        "-/var/lib/fedkace",
        "-/var/lib/fedkace-supernode",
    ]
    shared = (DEPLOY / "systemd" / "fedkace-supernode.service.d" / "models.conf").read_text()
    folder = re.search(r"^Environment=FEDKACE_MODELS=(\S+)$", shared, re.MULTILINE)
    assert folder and f"--state {folder[1]}/" in settings["ExecStart"]
    assert f"SupplementaryGroups={settings['SupplementaryGroups']}\n" in shared


def test_every_unit_has_the_sandbox_and_a_setting_of_the_operator_counts_more(tmp_path: Path) -> None:
    need_tools("systemd-analyze")
    units = Path(shutil.copytree(DEPLOY / "systemd", tmp_path / "units"))

    def enforced(unit: str) -> set[str]:
        command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--json=short", f"{units}/{unit}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {each["name"].rstrip("=") for each in json.loads(done.stdout) if each["set"]}

    sandbox = {"NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "LockPersonality"}
    for unit in units.glob("*.service"):
        assert sandbox <= enforced(unit.name), unit.name
        # Before systemd 250, ProtectClock forbids every device but the clock, whatever PrivateDevices says.
        assert "ProtectClock" not in enforced(unit.name)
    edited = units / "fedkace-supernode.service.d" / "override.conf"  # of `systemctl edit`
    edited.write_text("[Service]\nPrivateDevices=no\n")
    assert sandbox - enforced("fedkace-supernode.service") == {"PrivateDevices"}


def test_systemd_understands_every_line_of_the_units(tmp_path: Path) -> None:
    need_tools("systemd-analyze")

    def complaints(*units: Path) -> list[str]:
        done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
        # The programs lie where docs/deployment.md puts them, on another machine.
        return [line for line in done.stderr.splitlines() if "fedkace" in line and "is not executable" not in line]

    assert not complaints(*sorted((DEPLOY / "systemd").glob("*.service")))
    wrong = tmp_path / "fedkace-wrong.service"
    wrong.write_text(
        (DEPLOY / "systemd" / "fedkace-serve.service").read_text().replace("Restart=always", "Restart=aye")
    )
    assert complaints(wrong)


def test_the_scripts_pass_shellcheck(tmp_path: Path) -> None:
    need_tools("shellcheck")

    def complaints(*scripts: Path) -> str:
        command = ["shellcheck", "-x", "-P", str(DEPLOY.parent), *map(str, scripts)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    scripts = sorted(DEPLOY.glob("*.sh"))
    assert len(scripts) >= 10 and not complaints(*scripts, ROOT / ".ci" / "run")
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/usr/bin/env bash\ncat $1\n")
    assert "SC2086" in complaints(wrong)


@pytest.mark.parametrize("given", [{}, {"no_proxy": "intranet"}, {"NO_PROXY": "intranet"}])
def test_no_proxy_stands_between_the_parts_of_one_machine(given: dict[str, str], env: dict[str, str]) -> None:
    outside = {name: value for name, value in env.items() if name.lower() != "no_proxy"} | given
    asked = (
        "import sys, urllib.request as r; sys.exit(not all(map(r.proxy_bypass, ('127.0.0.1', 'localhost'))) "
        f"or bool(r.proxy_bypass('intranet')) != {bool(given)})"
    )
    told = f"source {DEPLOY}/common.sh; through_proxy hub; through_proxy intranet; through_proxy 127.0.0.1; python3 -c {quote(asked)}"
    done = subprocess.run(
        ["bash", "-c", told],
        env={**outside, "https_proxy": "http://me:secret@proxy:3128"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert [line.split()[1] for line in said] == (["hub"] if given else ["hub", "intranet"])
    assert all("https_proxy" in line and "no_proxy" in line and "secret" not in line for line in said)


def test_a_service_whose_run_could_not_be_continued_names_the_key(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "pyproject.toml").touch()
    keys = tmp_path / "run.toml"
    told = {"FEDKACE_APP": str(tmp_path), "FEDKACE_CONNECTION": "hub", "FEDKACE_RUN": str(keys)}
    told["FEDKACE_RUN_ID"] = str(tmp_path / "id")
    assert "does not exist" in refused("run.sh", env={**env, **told})
    for text, words in (
        ("resume = true", "run-name is not set"),
        ('run-name = "a"', "resume = false: must be true"),
        ('run-name = "a"\nresume = true\nresults-dir = "here"', "results-dir = 'here': must be an absolute path"),
    ):
        keys.write_text(text)
        said = refused("run.sh", env={**env, **told})
        assert f"{keys}: " in said and words in said


def test_a_reload_that_comes_before_the_service_listens_does_not_end_it(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "run.toml").touch()
    told = {"FEDKACE_APP": str(tmp_path), "FEDKACE_CONNECTION": "hub", "FEDKACE_RUN": str(tmp_path / "run.toml")}
    told["FEDKACE_RUN_ID"] = str(tmp_path / "id")
    early = tmp_path / "early" / "python3"
    early.parent.mkdir()
    early.write_text(f'#!/bin/sh\nkill -HUP $$\nexec {quote(sys.executable)} "$@"\n')
    early.chmod(0o700)
    path = f"{early.parent}:{env['PATH']}"
    assert "run-name is not set" in refused("run.sh", env={**env, **told, "PATH": path})


def test_a_log_keeps_its_newest_part_and_one_before(tmp_path: Path) -> None:
    source = (DEPLOY / "federation.sh").read_text()
    keep = source[source.index("keep() {") : source.index("# Print what a member")]
    lines = "".join(f"{number:08d}\n" for number in range(1000))
    told = f"set -euo pipefail; log_bytes=900; {keep} keep {tmp_path}/log"
    subprocess.run(["bash", "-c", told], input=lines, text=True, check=True)
    newest, before = (tmp_path / "log").read_text(), (tmp_path / "log.1").read_text()
    assert len(before) == 900 and len(newest) <= 900 and lines.endswith(before + newest)
