"""What a deployment installs is fixed by hashes, and a release is built and checked as a whole."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.systems.federation import DEPLOY, ROOT
from support.systems.proxy import deployed
from support.tools import need_modules, need_tools

RELEASE = deployed("release")
ReleaseError = RELEASE.ReleaseError
ABOUT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HASH = "--hash=sha256:" + "0" * 64


def test_the_lock_file_has_one_version_and_hashes_of_all_that_the_project_requires() -> None:
    text = (DEPLOY / "requirements.txt").read_text()
    lock = RELEASE.read_lock(text)
    RELEASE.check_lock(ABOUT["project"], ABOUT["build-system"]["requires"], lock)
    names = {entry.requirement.name for entry in lock}
    assert {"flwr", "torch", "ray", "setuptools", "starlette"} <= names and len(lock) > 60
    assert not re.search(r"https?:|file:|--index|--find-links|--trusted-host", text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("numpy==2.4.6 --hash=md5:00\n", "must have at least one hash"),
        (f"numpy==2.* {HASH}\n", "must name one version"),
        (f"numpy @ https://evil.example/numpy.whl {HASH}\n", "must contain neither options nor addresses"),
    ],
)
def test_a_lock_file_that_leaves_anything_open_is_refused(text: str, words: str) -> None:
    with pytest.raises(ReleaseError, match=words) as caught:
        RELEASE.read_lock(text)
    assert len(str(caught.value).splitlines()) == 1


def test_the_image_installs_nothing_without_a_hash_and_starts_from_a_digest() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [line for line in lines if re.search(r"\bpip3? +install\b", line)]
    assert len(installs) == 2
    for line in installs:
        assert "--require-hashes" in line or {"--no-index", "--no-deps", "--no-build-isolation"} <= set(line.split())
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert bases and set(bases) == {"${BASE}"}
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert base.endswith("@${DIGEST}")
    (digest,) = [line.removeprefix("ARG DIGEST=") for line in lines if line.startswith("ARG DIGEST=")]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)


def test_the_workflow_names_foreign_actions_by_commit() -> None:
    workflows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yaml")]
    uses = [line for text in workflows for line in re.findall(r"uses: (.*)", text)]
    assert uses and all(re.fullmatch(r"\S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each) for each in uses)


def copied(folder: Path) -> Path:
    """Return a copy of all that a release is made from, outside a repository."""
    for name in ("fedkace_flwr", "strategies", "clients", "experiments"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "deploy").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "deploy/requirements.txt", "deploy/release.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Path], "subprocess.CompletedProcess[str]"]:
    """Run the copy's ``release.py``."""
    need_modules("build", "twine", "cyclonedx_py", "setuptools")

    def run(root: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(root / "deploy" / "release.py"), str(folder)]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    return run


@pytest.mark.exhaustive
def test_a_release_is_complete_has_its_checksums_and_can_be_repeated(make: Any, tmp_path: Path) -> None:
    root = copied(tmp_path / "source")
    done = make(root, tmp_path / "dist")
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"fedkace_flwr-{ABOUT['project']['version']}"
    made = {path.name: path.read_bytes() for path in (tmp_path / "dist").iterdir()}
    wheel = f"{name}-py3-none-any.whl"
    assert set(made) == {wheel, f"{name}.tar.gz", f"{name}.cdx.json", "SHA256SUMS"}
    sums = dict(line.split("  ")[::-1] for line in made.pop("SHA256SUMS").decode().splitlines())
    assert sums == {each: hashlib.sha256(content).hexdigest() for each, content in made.items()}
    bill = json.loads(made[f"{name}.cdx.json"])
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "fedkace-flwr"
    listed = {(each["name"], each["version"]) for each in bill["components"]}
    lock = RELEASE.read_lock((DEPLOY / "requirements.txt").read_text())
    assert listed == {(entry.requirement.name, entry.version) for entry in lock}

    (root / "clients" / "base.py").touch()
    assert make(root, tmp_path / "again").returncode == 0
    assert (tmp_path / "again" / wheel).read_bytes() == made[wheel]

    done = make(root, tmp_path / "dist")
    assert done.returncode == 1 and done.stderr == f"error: {tmp_path}/dist: must be empty\n"


@pytest.mark.exhaustive
def test_a_release_that_is_wrong_is_not_made(make: Any, tmp_path: Path) -> None:
    root, dist = copied(tmp_path / "source"), tmp_path / "dist"

    def fails(words: str) -> None:
        done = make(root, dist)
        assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert not dist.exists()

    readme, lock = root / "README.md", root / "deploy" / "requirements.txt"
    before = lock.read_text()
    lock.write_text(re.sub(r"(?m)^flwr==\S+", "flwr==1.40.0", before))
    fails("flwr==1.40.0: must be <1.43,>=1.41")
    lock.write_text(before)
    project = root / "pyproject.toml"
    kept = project.read_text()
    project.write_text(
        kept.replace('readme = "README.md"', 'readme = {file = "README.md", content-type = "text/x-rst"}')
    )
    readme.write_text("`a\n\n====\nb\n=\n")
    fails("twine failed: ")
    project.write_text(kept)
    readme.unlink()
    fails("README.md: does not exist")


@pytest.mark.exhaustive
def test_a_release_is_made_of_what_is_committed(tmp_path: Path) -> None:
    need_tools("git")
    root = copied(tmp_path / "source")
    names = ["fedkace_flwr/clients/base.py", "pyproject.toml", "deploy/requirements.txt"]
    RELEASE.check_committed(root, names)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run(["git", *identity, *command], cwd=root, check=True)
    RELEASE.check_committed(root, names)
    (root / "elsewhere").write_text("")
    RELEASE.check_committed(root, names)
    with (root / "clients" / "base.py").open("a") as file:
        file.write("\n")
    with pytest.raises(ReleaseError, match=r"clients/base\.py: differs from the newest commit"):
        RELEASE.check_committed(root, names)
