"""The wheel, installed in an environment of its own, works outside any checkout; and Flower accepts the app."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.common import SMALL, rounds_of
from support.tools import need_modules

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline

ROOT = Path(__file__).resolve().parents[2]
TINY = [f"--set={key}={value}" for key, value in {**SMALL, "method": "fedkace", "keep-models": "always"}.items()]

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200), pytest.mark.xdist_group("wheel")]


class Installed:
    """An environment with the wheel; what the wheel requires comes from this one's packages."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "env", symlinks=True, with_pip=False)
        self.programs = folder / "env" / "bin"
        self.python = self.programs / "python"
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-index", str(wheel)], check=True)
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        self.site = site
        # Flower's own programs, for this environment's Python. Paths in a .pth file are added without reading any .pth
        # files there, so that an editable installation of the project stays out.
        (site / "required.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        for name, target in (("flwr", "flwr.cli.app:app"), ("flower-superlink", "flwr.superlink.cli:flower_superlink")):
            module, _, function = target.partition(":")
            (self.programs / name).write_text(f"#!{self.python}\nfrom {module} import {function}\n{function}()\n")
            (self.programs / name).chmod(0o755)
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        left_out = ("PYTHON", "FLWR", "RAY", "VIRTUAL_ENV")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        self.environment = {
            **kept,
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
        }

    def run(self, *command: object, fails: bool = False) -> str:
        """Run a command in an empty folder and return its output."""
        words = [str(each) for each in command]
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def fedkace(self, *arguments: object, fails: bool = False) -> str:
        """Run the console command."""
        return self.run(self.programs / "fedkace", *arguments, fails=fails)


def files_of_package() -> set[str]:
    """Files of the checkout that a wheel must hold."""
    walk = os.walk(ROOT / "fedkace_flwr", followlinks=True)
    found = {Path(folder, name) for folder, _, names in walk for name in names}
    left_out = {"__pycache__", "bench", "soak"}
    return {path.relative_to(ROOT).as_posix() for path in found if not left_out & set(path.parts)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_modules("setuptools", "pip")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in [*files_of_package(), "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(made), str(source)], check=True)
    (wheel,) = made.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def results(installed: Installed) -> Path:
    """Results of the quickstart's first run, shrunk, on Flower's simulation engine."""
    said = installed.fedkace("run", "quickstart", *TINY, "--only", "fedkace_*", "--workers", "1")
    assert "fedkace_seed-7" in said and "picture: results/quickstart/fedkace_seed-7/accuracy.png" in said
    return installed.folder / "results" / "quickstart"


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == files_of_package()
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_all_modules_come_from_the_wheel(installed: Installed) -> None:
    program = "from fedkace_flwr import clients, experiments; print(clients.__file__, experiments.__file__)"
    assert installed.run(installed.python, "-c", program).count(str(installed.site)) == 2
    installed.run(installed.python, "-c", "import clients", fails=True)


def test_a_study_by_name_runs_on_flowers_engine_with_the_checkouts_numbers(results: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "keep-models": "always"}
    run_inline(Config.parse({**settings, "results-dir": str(tmp_path), "run-name": "inline"}))
    assert rounds_of(results / "fedkace_seed-7") == rounds_of(tmp_path / "inline")


def test_every_command_works(installed: Installed, results: Path) -> None:
    help_text = installed.fedkace("--help")
    assert help_text.startswith("usage: fedkace ")
    names = set(re.findall(r"^    (\w+)\b", help_text, re.MULTILINE))
    assert names >= {"run", "keys", "report", "table", "keep", "bench", "feed", "predict", "serve", "app"}
    for name in names:
        assert f"usage: fedkace {name}" in installed.fedkace(name, "--help")
    run = results / "fedkace_seed-7"
    table = installed.fedkace("table", run)
    assert "fedkace_seed-7" in table and table == installed.run(
        installed.python, "-m", "fedkace_flwr.experiments", "table", run
    )
    installed.fedkace("report", results)
    assert (results / "report" / "index.html").stat().st_size > 10_000
    installed.fedkace("keep", run, installed.folder / "kept")
    assert (installed.folder / "kept" / "rounds.parquet").exists()
    installed.fedkace("feed", installed.folder / "inboxes", *TINY)
    (picture, *_) = sorted((results.parent.parent / "inboxes").rglob("*.np*"))
    assert picture.stat().st_size
    answers = json.loads(
        installed.fedkace("predict", "--json", a_picture(installed.folder), "--state", run / "clients" / "client-000")
    )
    assert len(answers["answers"][0]["classes"]) == 3
    assert "there is no such folder" in installed.fedkace("serve", "--state", "nowhere", fails=True)
    assert "is not in the installed package" in installed.fedkace("bench", "gpu", fails=True)


def a_picture(folder: Path) -> Path:
    from PIL import Image

    Image.new("L", (8, 8), 128).save(folder / "grey.png")
    return folder / "grey.png"


def test_the_wheel_has_the_same_app_as_the_checkout(installed: Installed, tmp_path: Path) -> None:
    app = installed.folder / "the-app"
    assert installed.fedkace("app", app).strip() == str(app)
    assert installed.fedkace("app", app).strip() == str(app)  # its own folder is renewed
    flwr = str(Path(sys.executable).with_name("flwr"))
    bundles = []
    for folder, place in ((app, tmp_path / "wheel"), (ROOT, tmp_path / "checkout")):
        place.mkdir()
        subprocess.run([flwr, "build", "--app", str(folder)], cwd=place, check=True, capture_output=True)
        (bundle,) = place.glob("*.fab")
        bundles.append(bundle.read_bytes())
    assert bundles[0] == bundles[1]
