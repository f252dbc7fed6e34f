"""Build what a release consists of, and check it: sdist, wheel, bill of materials and checksums.

Run as ``python deploy/release.py FOLDER`` (``make release``), with the tools of the extra ``dev``. It needs no network.
The folder must be empty or new. The wheel is built from the sdist, and has the same bytes each time that it is built
from the same commit with the same tools.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = Path("deploy") / "requirements.txt"
EXTRAS = ("serve",)
"""Extras whose requirements the lock file contains, besides those of the project itself."""


class ReleaseError(Exception):
    """Something is wrong with a release; the message is one line."""


@dataclass(frozen=True)
class Locked:
    """An entry of the lock file."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def version(self) -> str:
        """The version, the only one that the entry accepts."""
        (one,) = self.requirement.specifier
        return one.version


def read_lock(text: str) -> list[Locked]:
    """Read a lock file.

    Raises
    ------
    ReleaseError
        An entry names no single version or no hash, or is an option or a URL.
    """
    found = []
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        entry = entry.partition(" #")[0].strip()
        if not entry or entry.startswith("#"):
            continue
        wanted, *hashes = (part.strip() for part in entry.split("--hash="))
        if wanted.startswith("-") or "://" in entry or " @ " in wanted:
            raise ReleaseError(f"{LOCK}: {entry[:100]!r}: must contain neither options nor addresses")
        requirement = Requirement(wanted)
        pinned = [each.operator == "==" and "*" not in each.version for each in requirement.specifier]
        if pinned != [True]:
            raise ReleaseError(f"{LOCK}: {wanted!r}: must name one version, NAME==VERSION")
        if not hashes or not all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes):
            raise ReleaseError(f"{LOCK}: {wanted!r}: must have at least one hash, --hash=sha256:...")
        found.append(Locked(requirement, tuple(hashes)))
    if not found:
        raise ReleaseError(f"{LOCK}: contains no requirement")
    return found


def requirements_of(project: Mapping[str, Any], extras: Iterable[str]) -> list[Requirement]:
    """Return the project's requirements, and those of some extras, which must not name other extras."""
    named = [text for extra in extras for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in [*project["dependencies"], *named]]


def check_lock(project: Mapping[str, Any], build: Sequence[str], lock: Sequence[Locked]) -> None:
    """Check that the lock file has what the project requires to run and to be built.

    Raises
    ------
    ReleaseError
        A requirement is missing, or its locked version does not fit.
    """
    by_name: dict[str, list[Locked]] = {}
    for entry in lock:
        by_name.setdefault(canonicalize_name(entry.requirement.name), []).append(entry)
    for wanted in [*requirements_of(project, EXTRAS), *map(Requirement, build)]:
        entries = by_name.get(canonicalize_name(wanted.name), [])
        if not entries:
            raise ReleaseError(f"{LOCK}: {wanted.name} is missing; run make lock")
        for entry in entries:
            if not SpecifierSet(str(wanted.specifier)).contains(entry.version, prereleases=True):
                raise ReleaseError(
                    f"{LOCK}: {wanted.name}=={entry.version}: must be {wanted.specifier}, as pyproject.toml says; "
                    "run make lock"
                )


def contents_of_package(root: Path, settings: Mapping[str, Any]) -> set[str]:
    """Return the files that a wheel must contain: all modules, and the data that pyproject.toml names."""
    chosen = settings["packages"]["find"]
    patterns = [name.rstrip("*") for name in chosen["include"]]
    walks = [os.walk(root / name, followlinks=True) for name in patterns]
    found = {
        Path(folder, name) for walk in walks for folder, _, names in walk for name in names if name.endswith(".py")
    }
    for package, globs in settings["package-data"].items():
        folder = root.joinpath(*package.split("."))
        found |= {path for pattern in globs for path in folder.glob(pattern)}
    names = {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}
    left_out = [each.replace(".", "/") for each in chosen.get("exclude", [])]
    return {name for name in names if not any(fnmatch.fnmatch(name, each) for each in left_out)}


def check_wheel(wheel: Path, expected: set[str]) -> None:
    """Check that a wheel holds the expected files, its metadata and licence, and nothing else.

    Raises
    ------
    ReleaseError
        A file is missing or should not be there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    about = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    if missing := expected - names:
        raise ReleaseError(f"{wheel.name}: {len(missing)} files are missing, the first is {min(missing)}")
    if more := names - about - expected:
        raise ReleaseError(f"{wheel.name}: {len(more)} files should not be there, the first is {min(more)}")
    for wanted in ("*/METADATA", "*/RECORD", "*/licenses/LICENSE"):
        if not fnmatch.filter(about, wanted):
            raise ReleaseError(f"{wheel.name}: {wanted} is missing")


def check_sdist(sdist: Path, expected: set[str]) -> None:
    """Check that an sdist holds the expected files and what a build needs.

    Raises
    ------
    ReleaseError
        A file is missing.
    """
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := (expected | {"pyproject.toml", "README.md", "LICENSE"}) - names:
        raise ReleaseError(f"{sdist.name}: {len(missing)} files are missing, the first is {min(missing)}")


def check_bill(bill: Path, lock: Sequence[Locked], version: str) -> None:
    """Check that a bill of materials names the project, and all locked packages with their hashes.

    Raises
    ------
    ReleaseError
        A package is missing, or has other hashes.
    """
    read = json.loads(bill.read_text(encoding="utf-8"))
    if read["bomFormat"] != "CycloneDX" or read["metadata"]["component"]["version"] != version:
        raise ReleaseError(f"{bill.name}: is not CycloneDX's description of version {version}")
    listed = {
        (canonicalize_name(each["name"]), each["version"]): {
            f"sha256:{value['content']}" for where in each["externalReferences"] for value in where.get("hashes", [])
        }
        for each in read["components"]
    }
    for entry in lock:
        name = canonicalize_name(entry.requirement.name)
        if listed.get((name, entry.version)) != set(entry.hashes):
            raise ReleaseError(f"{bill.name}: {name} {entry.version}: is missing or has other hashes than {LOCK}")


def run(*command: object, folder: Path, **more: str) -> None:
    """Run a program.

    Raises
    ------
    ReleaseError
        It fails.
    """
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        what = words[2] if words[1] == "-m" else "the installed package"
        raise ReleaseError(f"{what} failed: {said[-1] if said else f'exit code {done.returncode}'}")


def git(root: Path, *command: str) -> str:
    """Return what git says; nothing outside a repository."""
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def check_committed(root: Path, names: Iterable[str]) -> None:
    """Check that the files are those of the newest commit; outside a repository, do nothing.

    Raises
    ------
    ReleaseError
        A file is changed or new.
    """
    root = root.resolve()
    paths = {str((root / name).resolve().relative_to(root)) for name in names}  # git looks at no file behind a link
    changed = git(root, "status", "--porcelain", "--", *sorted(paths)).splitlines()
    if changed:
        raise ReleaseError(f"{changed[0].split()[-1]}: differs from the newest commit; commit it first")


def release(root: Path, folder: Path) -> None:
    """Build and check everything, and move it to the folder.

    Raises
    ------
    ReleaseError
        Something is wrong; nothing is moved.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"{folder}: must be empty")
    about = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project, version = about["project"], about["project"]["version"]
    expected = contents_of_package(root, about["tool"]["setuptools"])
    sources = expected | {"pyproject.toml", "README.md", "LICENSE"}
    if missing := [name for name in sorted(sources) if not (root / name).is_file()]:
        raise ReleaseError(f"{missing[0]}: does not exist")
    check_committed(root, sources | {LOCK.as_posix()})
    lock = read_lock((root / LOCK).read_text(encoding="utf-8"))
    check_lock(project, about["build-system"]["requires"], lock)
    with tempfile.TemporaryDirectory() as scratch:
        # setuptools writes into the folder that it builds.
        source, made = Path(scratch) / "source", Path(scratch) / "made"
        for name in sorted(sources):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, source / name)
        os.umask(0o022)
        # All files get the time of the newest commit.
        python, when = sys.executable, {"SOURCE_DATE_EPOCH": git(root, "log", "-1", "--format=%ct") or "1577836800"}
        run(python, "-m", "build", "--no-isolation", "--outdir", made, source, folder=source, **when)
        (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
        check_wheel(wheel, expected)
        check_sdist(sdist, expected)
        run(python, "-m", "twine", "check", "--strict", wheel, sdist, folder=made)
        site = Path(scratch) / "site"
        command = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel]
        run(*command, folder=made, PIP_DISABLE_PIP_VERSION_CHECK="1")
        look = "import sys, fedkace_flwr; sys.exit(not fedkace_flwr.__file__.startswith(sys.argv[1]))"
        run(python, "-c", look, site, folder=site, PYTHONPATH=str(site))
        run(python, "-m", "fedkace_flwr.experiments", "--help", folder=site, PYTHONPATH=str(site))
        bill = made / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
        options = ["--pyproject", root / "pyproject.toml", "--mc-type", "application", "--output-reproducible"]
        options += ["--output-format", "JSON", "--output-file", bill]
        run(python, "-m", "cyclonedx_py", "requirements", *options, root / LOCK, folder=made)
        check_bill(bill, lock, version)
        files = sorted([wheel, sdist, bill])
        sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
        (made / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(made.iterdir()):
            shutil.move(path, folder / path.name)
            print(folder / path.name)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="release.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        release(ROOT, parser.parse_args().folder)
    except ReleaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
