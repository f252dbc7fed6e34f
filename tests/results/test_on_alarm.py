"""The operator's command for alarms, with real programs."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.results import on_alarm
from fedkace_flwr.results.on_alarm import check_command, tell

ALARMS = [{"round": 7, "kind": "accuracy", "client": 2, "text": "has fallen: 6%", "name": "node-ä"}]


def made(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def command(line: str) -> Config:
    config = Config.parse({"on-alarm": line})
    check_command(config)
    return config


def test_the_command_gets_its_words_and_the_alarms(tmp_path: Path) -> None:
    script = made(tmp_path / "ring bell", 'printf "%s|" "$@" > "$1"; cat >> "$1"')
    tell(command(f"'{script}' {tmp_path}/told 'a b' '$HOME;*'"), tmp_path, ALARMS)
    words, told = (tmp_path / "told").read_text().rsplit("|", 1)
    assert words.split("|")[1:] == ["a b", "$HOME;*"], "no shell reads them"
    assert json.loads(told) == {"folder": str(tmp_path), "alarms": ALARMS}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "cat > /dev/null; echo no; printf 'no \\033[31mroute' >&2; exit 3",
            r"ended with status 3: no.*\\x1b\[31mroute",
        ),
        ("kill -9 $$", "ended with status -9"),
    ],
)
def test_a_command_that_fails_is_a_line_in_the_log(
    script: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = made(tmp_path / "program", script)
    tell(command(str(program)), tmp_path, ALARMS)
    (line,) = caplog.messages
    assert re.match(f"on-alarm: {program}: {said}", line) and line.isprintable()


def test_a_command_that_is_gone_by_then_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = made(tmp_path / "program", "")
    config = command(str(program))
    program.unlink()
    tell(config, tmp_path, ALARMS)
    assert len(caplog.messages) == 1 and "No such file" in caplog.messages[0]


def test_a_command_that_hangs_is_ended_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_alarm, "_SECONDS", 0.5)
    program = made(tmp_path / "program", f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    tell(command(str(program)), tmp_path, ALARMS)
    assert "was ended after 0.5 seconds" in caplog.messages[0]
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nobody_waits_for_what_the_command_leaves_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = made(tmp_path / "program", f"sleep 1000 & echo $! > {tmp_path}/child")
    tell(command(str(program)), tmp_path, ALARMS)
    assert caplog.messages == []
    os.kill(int((tmp_path / "child").read_text()), 9)


@pytest.mark.parametrize("line", ["no-such-program --now", "./missing.sh", "'unbalanced", "/etc/passwd"])
def test_what_cannot_be_run_is_refused_at_the_start(line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^on-alarm = .*{re.escape(line)}.*: .*must be") as refused:
        command(line)
    assert "\n" not in str(refused.value)


def test_without_a_command_nothing_runs(tmp_path: Path) -> None:
    tell(command(""), tmp_path, ALARMS)
