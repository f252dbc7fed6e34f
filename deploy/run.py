"""Submit a run to the SuperLink, wait for its end, and submit it again until it is stopped on purpose.

``run.sh`` calls this file. Each submission continues the run after its last recorded round. ``fedkace stop``, ``flwr
stop`` and a last round end the service; SIGHUP has the run submitted again at once, with the app and the settings as
they are then. Flower's command line takes a second of CPU time for each question, so this file asks the SuperLink itself.
"""

import json
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click
import httpx
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import init_http_client_from_connection
from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient

LOOK = 5.0  # seconds between two questions to the SuperLink
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0  # seconds before a failed run is submitted again
LONG_ENOUGH = 600.0  # seconds after which a failure counts as the first of its kind


def stop(text: str) -> NoReturn:
    """End with one line."""
    sys.exit(f"error: {text}")


def check(config: Path) -> None:
    """Check that a configuration continues one run in one place."""
    try:
        keys = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(f"{config}: cannot be read as TOML: {error}")
    if not keys.get("run-name"):
        stop(f"{config}: run-name is not set: the run that is continued must have a name")
    if keys.get("resume") is not True:
        stop(f"{config}: resume = {json.dumps(keys.get('resume', False))}: must be true for a run that is continued")
    if not Path(str(keys.get("results-dir", ""))).is_absolute():
        stop(f"{config}: results-dir = '{keys.get('results-dir', '')}': must be an absolute path")


def say(text: str) -> None:
    """Print a line for the log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


class Service:
    """The run and its submissions.

    Parameters
    ----------
    app : str
        Folder of the app.
    connection : str
        Name of the SuperLink in Flower's configuration.
    config : Path
        The run's configuration, TOML.
    file : Path
        File that keeps the number of the last submission, and how it ended if no other follows.
    """

    def __init__(self, app: str, connection: str, config: Path, file: Path) -> None:
        self._command = ["flwr", "run", app, connection, "--run-config", str(config), "--format", "json"]
        self._client: ControlHttpClient = init_http_client_from_connection(read_superlink_connection(connection))
        self._file = file
        self._again = False
        signal.signal(signal.SIGHUP, self._wake)

    def _wake(self, *_: Any) -> None:
        self._again = True

    def _rest(self, seconds: float) -> None:
        """Wait, at most until SIGHUP."""
        end = time.monotonic() + seconds
        while not self._again and (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))

    def keep_up(self) -> None:
        """Submit the run until it is stopped on purpose."""
        number, *ended = self._file.read_text().split() if self._file.exists() else [""]
        if ended:
            say(f"run {number} is {ended[0]}: nothing to do; remove {self._file} to go on with it")
            return
        pause, last = FIRST_PAUSE, ""
        while True:
            begun = time.monotonic()
            self._await_superlink()
            if number:
                say(f"run {number} was submitted before; waiting for its end")
            else:
                number, last = self._submit()
            if number:
                status, last = self._end_of(int(number))
                if not self._again and status != "finished:failed":
                    self._keep(f"{number} {status}")
                    say(f"run {number} is {status}: the service ends")
                    return
            if time.monotonic() - begun > LONG_ENOUGH:
                pause = FIRST_PAUSE
            if not self._again:
                say(f"run {number or 'not accepted'}: failed: {last}; submitted again in {pause:g} s")
                self._rest(pause)
            pause = FIRST_PAUSE if self._again else min(2 * pause, LONGEST_PAUSE)
            number, self._again = "", False

    def _submit(self) -> tuple[str, str]:
        """Submit the run; its number, or an empty one and why it was not accepted."""
        done = subprocess.run(self._command, capture_output=True, text=True, check=False)
        try:
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            return "", " ".join((done.stderr or done.stdout).split())
        if not answer.get("success"):
            return "", " ".join(str(answer.get("error-message", answer)).split())
        number = str(answer["run-id"])
        self._keep(number)
        say(f"run {number} is submitted")
        return number, ""

    def _keep(self, text: str) -> None:
        """Replace the file."""
        aside = self._file.with_name(f"{self._file.name}.new")
        aside.write_text(f"{text}\n")
        aside.replace(self._file)

    def _ask(self, call: Any, request: Any) -> Any:
        """Ask the SuperLink; None if it cannot be reached or cannot answer now."""
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                return None
            raise
        except httpx.RequestError:
            return None

    def _await_superlink(self) -> None:
        told = False
        while self._ask(self._client.ListRuns, ListRunsRequest(limit=1)) is None:
            if not told:
                say("waiting for the SuperLink")
            told = True
            time.sleep(LOOK)

    def _end_of(self, number: int) -> tuple[str, str]:
        """Wait for the end of a submission, also of one that the SuperLink has forgotten; its status and details."""
        while True:
            if self._again:
                with suppress(httpx.HTTPStatusError):  # it has ended by itself
                    self._ask(self._client.StopRun, StopRunRequest(run_id=number))
            try:
                answer = self._ask(self._client.ListRuns, ListRunsRequest(run_id=number))
            except httpx.HTTPStatusError as error:
                return "finished:failed", f"the SuperLink does not know it ({error.response.text})"
            if answer is not None:
                (run,) = answer.run_dict.values()
                if run.status.status == "finished":
                    details = " ".join(run.status.details.split())
                    return f"finished:{run.status.sub_status}", details or "without details"
            time.sleep(LOOK)


if __name__ == "__main__":
    app, connection, config, file = sys.argv[1:]
    check(Path(config))
    try:
        Service(app, connection, Path(config), Path(file)).keep_up()
    except click.ClickException as error:
        stop(" ".join(error.message.split()))
    except httpx.HTTPStatusError as error:
        stop(f"the SuperLink refuses: {error.response.text}")
