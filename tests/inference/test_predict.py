"""The command and the service, as processes of their own, while models come and go."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.common import SMALL
from support.made_models import CLASSES, blank, constant, picture

from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.errors import DataError
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.service import Watched, application

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of what the fuzzed pictures hold

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "fedkace_flwr.inference.predict"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def predict(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


class Service:
    """A service in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = (folder.parent / "service.log").open("w+")
        command = [*COMMAND, "serve", "--state", str(folder), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)$", line)
        assert found, line + self.said()
        self.port = int(found[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def said(self) -> str:
        """What the process has logged."""
        return Path(self.log.name).read_text()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def close(self) -> None:
        """Leave nothing behind."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@contextmanager
def serving_of(folder: Path, *arguments: str) -> Iterator[Service]:
    service = Service(folder, *arguments)
    try:
        yield service
    finally:
        service.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A client's folder with one generation: round 3 answers class 3."""
    serving.write(tmp_path / "client", constant(3, 3, seen=(1, 3, 4)))
    return tmp_path / "client"


# The command


def test_the_command_names_what_pictures_show_and_says_what_failed(folder: Path, tmp_path: Path) -> None:
    for name, content in (
        ("a.png", picture()),
        ("b.jpg", picture("JPEG", (300, 200))),
        ("broken.png", picture()[:200]),
    ):
        (tmp_path / name).write_bytes(content)
    images = [tmp_path / name for name in ("a.png", "broken.png", "missing.png", "b.jpg")]
    done = predict("--state", folder, *images, "--top", 2)
    assert done.returncode == 2
    head, first, second = done.stdout.splitlines()
    assert head == "global model of round 3, 3 of 10 classes met"
    assert re.fullmatch(rf"{tmp_path}/a\.png: class 3 9\d\.\d\d %, class 4 \d\.\d\d %", first)
    assert second.startswith(f"{tmp_path}/b.jpg: class 3 ")
    broken, missing = done.stderr.splitlines()
    assert broken.startswith(f"error: {tmp_path}/broken.png: it is damaged (")
    assert missing == f"error: {tmp_path}/missing.png: No such file or directory"

    done = predict("--state", folder, *images, "--json", "--top", 9)
    assert done.returncode == 2
    said = json.loads(done.stdout)
    assert said["model"]["seen"] == ["class 1", "class 3", "class 4"] and said["model"]["round"] == 3
    answers = {Path(each["image"]).name: each for each in said["answers"]}
    assert list(answers) == ["a.png", "broken.png", "missing.png", "b.jpg"]
    assert [each["class"] for each in answers["a.png"]["classes"]] == ["class 3", "class 4", "class 1"]
    assert sum(each["probability"] for each in answers["a.png"]["classes"]) == pytest.approx(1)
    assert "damaged" in answers["broken.png"]["error"] and "classes" not in answers["broken.png"]


def test_the_command_without_a_model_says_so_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "empty").mkdir()
    expected = {
        tmp_path / "nowhere": "there is no such folder",
        tmp_path / "empty": "there is no model yet",
        tmp_path: "name one of the folders in it: client",
    }
    for state, text in expected.items():
        done = predict("--state", state, tmp_path / "a.png")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {state}: ") and text in line
    done = predict("serve", "--state", tmp_path / "nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "there is no such folder" in done.stderr


def test_the_command_loads_neither_flower_nor_ray_nor_torchvision() -> None:
    code = "import sys, fedkace_flwr.inference.predict; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert not {"flwr", "ray", "torchvision", "sklearn", "starlette", "uvicorn"} & set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_answers_while_rounds_go_on(tmp_path: Path) -> None:
    """A run in a process of its own; the command is called again and again until the run is over."""
    config = {**SMALL, "rounds": 12, "results-dir": str(tmp_path), "run-name": "run", "keep-models": "always"}
    (tmp_path / "a.png").write_bytes(picture())
    folder = tmp_path / "run" / "clients" / "client-001"
    command = [sys.executable, "-m", "experiments.running.inline", json.dumps(config)]
    said, tries = [], 0
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as run:
        while (over := run.poll()) is None:
            tries += 1
            done = predict("--state", folder, tmp_path / "a.png", "--json")
            if done.returncode:
                assert not said, done.stderr  # once there is a model, there always is one
                assert "there is no such folder" in done.stderr or "there is no model yet" in done.stderr
            else:
                said.append(json.loads(done.stdout))
    assert over == 0
    said.append(json.loads(predict("--state", folder, tmp_path / "a.png", "--json").stdout))
    rounds = [each["model"]["round"] for each in said]
    assert rounds == sorted(rounds) and rounds[-1] == 12
    for each in said:
        assert {one["class"] for one in each["answers"][0]["classes"]} <= set(each["model"]["seen"])


# The service


def test_the_service_answers_and_says_what_it_is(folder: Path) -> None:
    with serving_of(folder) as service:
        for kind in ("PNG", "JPEG", "WEBP"):
            raw = service.client.post("/predict?top=2", content=picture(kind))
            form = service.client.post("/predict?top=2", files={"image": ("x", picture(kind))})
            assert raw.status_code == form.status_code == 200
            assert raw.json() == form.json()
            assert raw.json()["round"] == 3 and raw.json()["model"] == "global"
            assert [each["class"] for each in raw.json()["classes"]] == ["class 3", "class 4"]
        every = service.client.post("/predict?top=100", content=picture()).json()["classes"]
        assert [each["class"] for each in every] == ["class 3", "class 4", "class 1"]
        model = service.client.get("/model").json()
        assert (model["round"], model["model"], model["seen"]) == (3, "global", ["class 1", "class 3", "class 4"])
        assert service.client.get("/health").json() == {"status": "ok", "round": 3}
        assert service.stop() == 0
        assert "without authentication" not in service.said()


def test_the_service_waits_for_the_first_model(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    with serving_of(tmp_path / "client") as service:
        assert service.client.get("/health").json() == {"status": "ok", "round": None}
        for reply in (service.client.get("/model"), service.client.post("/predict", content=picture())):
            assert reply.status_code == 503 and "there is no model yet" in reply.json()["error"]
        serving.write(tmp_path / "client", constant(1, 5))
        while service.client.get("/health").json()["round"] != 1:
            pass
        assert service.client.post("/predict", content=picture()).json()["classes"][0]["class"] == "class 5"


def test_what_the_service_refuses_it_refuses_in_a_line_and_goes_on(folder: Path) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    two = {"a": ("a", picture()), "b": ("b", picture())}
    with serving_of(folder) as service:
        post = service.client.post
        replies = [
            (422, "it is damaged", post("/predict", content=picture()[:300])),
            (422, "not a picture", post("/predict", content=b"nothing of the kind")),
            (422, "the body is empty", post("/predict")),
            (422, "may have 50,000,000", post("/predict", content=blank(8000, 7000))),
            (422, "too many pixels", post("/predict", content=blank(14000, 14000))),
            (422, "top = '0'", post("/predict?top=0", content=picture())),
            (422, "top = 'many'", post("/predict?top=many", content=picture())),
            (422, "malformed", post("/predict", content=b"--y\r\n", headers=form)),
            (422, "malformed", post("/predict", content=b"x", headers={"content-type": "multipart/form-data"})),
            (422, "holds no file", post("/predict", content=b"--x--\r\n", headers=form)),
            (422, "malformed: Too many files", post("/predict", files=two)),
            (413, "may have 10,000,000 bytes", post("/predict", content=bytes(20_000_000))),
            (413, "may have 10,000,000 bytes", post("/predict", content=iter([bytes(1_000_000)] * 20))),
            (413, "may have 10,000,000 bytes", post("/predict", files={"a": ("a", bytes(20_000_000))})),
            (404, "Not Found", service.client.get("/elsewhere")),
            (405, "Method Not Allowed", service.client.get("/predict")),
        ]
        for status, reason, reply in replies:
            assert reply.status_code == status, (reason, reply.text)
            assert list(reply.json()) == ["error"]
            assert reason in reply.json()["error"] and "\n" not in reply.json()["error"]
        with socket.create_connection(("127.0.0.1", service.port)) as raw:  # a body that ends early
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        with socket.create_connection(("127.0.0.1", service.port)) as raw:  # not HTTP at all
            raw.sendall(b"\x00\xff\x16\x03\x01\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert post("/predict", content=picture()).status_code == 200
        assert service.stop() == 0
        assert "Traceback" not in service.said()


def test_a_damaged_newest_generation_falls_back_to_the_one_before(folder: Path) -> None:
    with serving_of(folder) as service:
        (folder / "models-000004.npz").write_bytes(b"half of it")
        while "models-000004.npz: its checksum does not match; round 3 answers" not in service.said():
            assert service.client.post("/predict", content=picture()).json()["round"] == 3
        serving.write(folder, constant(5, 4))
        while service.client.get("/health").json()["round"] != 5:
            pass
    (folder / "models-000006.npz").write_bytes(b"half of it")
    with serving_of(folder) as service:
        assert service.client.post("/predict", content=picture()).json()["round"] == 5


def test_the_service_outlives_its_folder(folder: Path) -> None:
    with serving_of(folder) as service:
        folder.rename(folder.with_name("moved"))
        for _ in range(3):
            assert service.client.post("/predict", content=picture()).json()["round"] == 3
        folder.with_name("moved").rename(folder)
        serving.write(folder, constant(4, 1))
        while service.client.get("/health").json()["round"] != 4:
            pass


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_is_dropped_while_models_replace_each_other(folder: Path) -> None:
    """The model of round r answers class r mod 10, so that an answer of two models at once would show."""
    last, results, failures = 63, [], []
    over = threading.Event()

    def ask(service: Service, seed: int) -> None:
        with httpx.Client(base_url=service.client.base_url, timeout=120) as client:
            while not over.is_set():
                try:
                    reply = client.post("/predict", content=picture(seed=seed))
                    assert reply.status_code == 200, reply.text
                    results.append(reply.json())
                except Exception as error:
                    failures.append(error)

    with serving_of(folder) as service:
        threads = [threading.Thread(target=ask, args=(service, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            for number in range(4, last + 1):
                serving.write(folder, constant(number, number % CLASSES))
                if number % 7 == 0:  # some certainly answer, the others come faster than they can be seen
                    while not failures and number not in {each["round"] for each in results[-20:]}:
                        service.client.get("/health")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert service.client.post("/predict", content=picture()).json()["round"] == last
        assert service.stop() == 0
        assert "Traceback" not in service.said() and "WARNING" not in service.said()
    assert not failures
    assert {each["classes"][0]["class"] for each in results if each["round"] > 3} != {f"class {last % CLASSES}"}
    for each in results:
        assert each["classes"][0]["class"] == f"class {each['round'] % CLASSES}"
    assert {7, 14, 21, 28, 35, 42, 49, 56} <= {each["round"] for each in results}


def test_a_request_in_flight_is_answered_before_the_end(folder: Path) -> None:
    """Half of a body is sent before SIGTERM, the rest once the service no longer takes connections."""
    body = picture(size=(200, 200))
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
    with serving_of(folder) as service:
        with socket.create_connection(("127.0.0.1", service.port)) as raw:
            raw.sendall(head)
            assert raw.recv(100).startswith(b"HTTP/1.1 100")  # the service is reading this request
            raw.sendall(body[:1000])
            service.process.send_signal(signal.SIGTERM)
            while _takes_connections(service.port):
                pass
            raw.sendall(body[1000:])
            reply = b"".join(iter(lambda: raw.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 200") and b'"class 3"' in reply
        assert service.process.wait(120) == 0


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_the_service_warns_where_other_machines_reach_it(folder: Path) -> None:
    with serving_of(folder, "--host", "0.0.0.0") as service:
        assert service.client.get("/health").status_code == 200
        warned = [line for line in service.said().splitlines() if "without authentication" in line]
        assert len(warned) == 1 and "reverse proxy" in warned[0]


def test_an_address_that_cannot_be_had_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = predict("serve", "--state", folder, "--port", port)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --host 127.0.0.1 --port {port}: cannot listen there")
    assert predict("serve", "--state", folder, "--port", 99999).returncode == 2


# What others send, fuzzed


def damaged(draw: Callable[..., Any], whole: bytes) -> bytes:
    """A body with bytes changed, left out or put in."""
    body = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(body) - 1, 0)))
        how = draw(st.sampled_from(["change", "cut", "drop", "insert", "number"]))
        if how == "change" and body:
            body[place] = draw(st.integers(0, 255))
        elif how == "cut":
            del body[place:]
        elif how == "drop":
            del body[place : place + draw(st.integers(1, 40))]
        elif how == "insert":
            body[place:place] = draw(st.binary(max_size=40))
        else:
            body[place : place + 4] = draw(
                st.sampled_from([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\0\xff\xff"])
            )
    return bytes(body)


SOUND = [
    picture(kind, (9, 7)) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA", "PCX", "SGI")
]


@st.composite
def bodies(draw: Callable[..., Any]) -> bytes:
    """Pictures that have suffered, and bytes that never were one."""
    if draw(st.integers(0, 4)) == 0:
        return bytes(draw(st.binary(max_size=300)))
    return damaged(draw, draw(st.sampled_from(SOUND)))


@st.composite
def forms(draw: Callable[..., Any]) -> tuple[bytes, str]:
    """Forms that have suffered, with their content type."""
    boundary = draw(st.sampled_from(["x", "----b", "a" * 70, "", "ä", '"', "x; y"]))
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\n'.encode()
    body = head + draw(st.sampled_from(SOUND)) + f"\r\n--{boundary}--\r\n".encode()
    if draw(st.booleans()):
        body = damaged(draw, body)
    charset = draw(st.sampled_from(["", "; charset=utf-8", "; charset=none", "; charset=utf-16", "; boundary=y"]))
    return body, f"multipart/form-data; boundary={boundary}{charset}"


@fuzzed
@given(bodies())
def test_any_bytes_become_a_square_or_a_line_that_says_why_not(body: bytes) -> None:
    try:
        square = read_square(body, Framing.of_files(16), max_pixels=10_000)
    except DataError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert square.shape == (3, 16, 16)


Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Post]:
    """Post to the service without a socket between; what it does not answer for is raised."""
    folder = tmp_path_factory.mktemp("client")
    serving.write(folder, constant(1, 1))
    watched = Watched(folder)
    watched.look()
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(application(watched)), base_url="http://test")
        yield lambda **content: runner.run(client.post("/predict", **content))
        runner.run(client.aclose())


@fuzzed
@given(
    body=bodies(), kind=st.sampled_from(["", "image/png", "multipart/form-data", "text/plain"]), top=st.text(max_size=8)
)
def test_any_body_is_answered_as_documented(post: Post, body: bytes, kind: str, top: str) -> None:
    reply = post(params={"top": top}, content=body, headers={"content-type": kind})
    _assert_documented(reply)


@fuzzed
@given(forms())
def test_any_form_is_answered_as_documented(post: Post, form: tuple[bytes, str]) -> None:
    body, kind = form
    _assert_documented(post(content=body, headers={"content-type": kind.encode()}))


def _assert_documented(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        assert reply.json()["classes"][0]["class"] == "class 1"
    else:
        assert reply.status_code == 422, reply.text
        assert list(reply.json()) == ["error"] and "\n" not in reply.json()["error"]


def test_the_fuzzed_pictures_are_sound_before_they_suffer() -> None:
    for sound in SOUND:
        assert read_square(sound, Framing.of_files(16)).shape == (3, 16, 16)
