"""The service, as a process of its own, while models come and go."""

import asyncio
import hashlib
import signal
import socket
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support.made.models import CLASSES, blank, constant, picture
from support.systems.service import Service, living, predict, served, serving_of

from fedkace_flwr.export.folder import write_folder
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.inference.access import Access
from fedkace_flwr.inference.kept_models import GLOBAL
from fedkace_flwr.inference.service import Watched, application


@pytest.mark.slow
def test_the_service_answers_and_says_what_it_is(folder: Path) -> None:
    with serving_of(folder) as service:
        for kind in ("PNG", "JPEG", "WEBP"):
            raw = service.client.post("/predict?top=2", content=picture(kind))
            assert raw.status_code == 200
            assert raw.json()["round"] == 3 and raw.json()["model"] == "global"
            assert [each["class"] for each in raw.json()["classes"]] == ["class 3", "class 4"]
        every = service.client.post("/predict?top=100", content=picture()).json()["classes"]
        assert [each["class"] for each in every] == ["class 3", "class 4", "class 1"]
        model = service.client.get("/model").json()
        assert (model["round"], model["model"], model["seen"]) == (3, "global", ["class 1", "class 3", "class 4"])
        assert service.client.get("/health").json() == {"status": "ok", "round": 3}
        assert service.stop() == 0


def test_its_metrics_count_what_was_answered_and_what_was_refused(folder: Path) -> None:
    with served(folder, Access(token=hashlib.sha256(b"a" * 16).digest())) as port:
        bearer = {"Authorization": f"Bearer {'a' * 16}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=bearer) as client:
            for picture_or_not in (picture(), picture(), b"no picture"):
                client.post("/predict", content=picture_or_not)
            client.get("/elsewhere"), client.get("/other"), client.get("/health", headers={"Authorization": "none"})
            assert client.get("/metrics", headers={"Authorization": "none"}).status_code == 401
            families = list(text_string_to_metric_families(client.get("/metrics").text))
    found = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}
    counted = {
        tuple(labels): value for (name, *labels), value in found.items() if name == "fedkace_predict_requests_total"
    }
    assert counted == {
        ("/predict", "200"): 2,
        ("/predict", "422"): 1,
        ("other", "404"): 2,
        ("/health", "401"): 1,
        ("/metrics", "401"): 1,
    }
    assert found["fedkace_predict_request_seconds_count", "/predict"] == 3
    assert (found["fedkace_predict_model_round",], found["fedkace_predict_failing",]) == (3, 0)


@pytest.mark.slow
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


def grey_alone(round_number: int):  # type: ignore[no-untyped-def]
    """A generation of finite weights that overflow on every picture that is not grey."""
    kept = constant(round_number, 3)
    first = next(array for array in kept.weights[GLOBAL].values() if array.ndim == 4)
    first[:] = 0
    first[:, 0, 1, 1], first[:, 1, 1, 1] = 1.6e38, -1.6e38
    return kept


@pytest.mark.slow
def test_its_health_says_when_predictions_fail(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    hopeless = constant(1, 3)
    hopeless.weights[GLOBAL]["output.bias"][:] = np.nan
    serving.write(folder, hopeless)
    with serving_of(folder) as service:
        while (health := service.client.get("/health")).status_code == 200:  # before it has looked
            pass
        told = health.json()
        assert (told["status"], told["round"]) == ("failing", None) and "not finite" in told["fault"]
        serving.write(folder, grey_alone(2))
        while (health := service.client.get("/health")).status_code != 200:
            pass
        assert health.json() == {"status": "ok", "round": 2}
        reply = service.client.post("/predict", content=picture())
        assert reply.status_code == 500 and "not finite" in reply.json()["error"]
        health = service.client.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["round"]) == (503, "failing", 2)
        assert service.client.post("/predict", content=blank(8, 8)).status_code == 200
        health = service.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert "Traceback" not in service.said()


@pytest.mark.slow
def test_what_the_service_refuses_it_refuses_in_a_line_and_goes_on(folder: Path) -> None:
    with serving_of(folder) as service:
        post = service.client.post
        replies = [
            (422, "it is damaged", post("/predict", content=picture()[:300])),
            (422, "not an image", post("/predict", content=b"nothing of the kind")),
            (422, "the body is empty", post("/predict")),
            (422, "at most 12,582,912", post("/predict", content=blank(4097, 3072))),
            (422, "too many pixels", post("/predict", content=blank(14000, 14000))),
            (422, "top = '0'", post("/predict?top=0", content=picture())),
            (422, "top = 'many'", post("/predict?top=many", content=picture())),
            (415, "send the bytes of the picture alone", post("/predict", files={"image": ("a", picture())})),
            (413, "at most 10,000,000 bytes", post("/predict", content=bytes(20_000_000))),
            (411, "state the content length", post("/predict", content=iter([bytes(1_000_000)] * 20))),
            (404, "Not Found", service.client.get("/elsewhere")),
            (405, "Method Not Allowed", service.client.get("/predict")),
        ]
        for status, reason, reply in replies:
            assert reply.status_code == status, (reason, reply.text)
            assert list(reply.json()) == ["error"]
            assert reason in reply.json()["error"] and "\n" not in reply.json()["error"]
        with socket.create_connection(("127.0.0.1", service.port)) as raw:  # a body that ends early
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
        with socket.create_connection(("127.0.0.1", service.port)) as raw:  # not HTTP at all
            raw.sendall(b"\x00\xff\x16\x03\x01\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert post("/predict", content=picture()).status_code == 200
        assert service.stop() == 0
        assert "Traceback" not in service.said()


@pytest.mark.slow
def test_a_damaged_newest_generation_falls_back_to_the_one_before(folder: Path) -> None:
    with serving_of(folder) as service:
        (folder / "models-000004.safetensors").write_bytes(b"half of it")
        while "fault" not in (found := service.client.get("/health").json()):
            assert service.client.post("/predict", content=picture()).json()["round"] == 3
        assert (found["status"], found["round"]) == ("ok", 3)
        assert "models-000004.safetensors: it is damaged" in found["fault"]
        assert "models-000004.safetensors: it is damaged" in service.said()
        assert "using the model of round 3 instead" in service.said()
        serving.write(folder, constant(5, 4))
        while service.client.get("/health").json()["round"] != 5:
            pass
        assert service.client.get("/health").json() == {"status": "ok", "round": 5}
    (folder / "models-000006.safetensors").write_bytes(b"half of it")
    with serving_of(folder) as service:
        assert service.client.post("/predict", content=picture()).json()["round"] == 5


def test_health_says_when_predictions_are_not_finite(folder: Path) -> None:
    watched = Watched(folder)
    watched.look()
    assert watched.predictor is not None and not watched.fault
    torch.nn.init.constant_(watched.predictor.networks[0][0].output.bias, torch.nan)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        service = application(watched)
        transport = httpx.ASGITransport(service)
        async with living(service), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/predict", content=picture()), await client.get("/health")

    answer, health = asyncio.run(ask())
    fault = "the model of round 3: its predictions are not finite"
    assert (answer.status_code, answer.json()) == (500, {"error": fault})
    assert (health.status_code, health.json()) == (503, {"status": "failing", "round": 3, "fault": fault})


@pytest.mark.slow
def test_an_exported_model_is_served_and_replaced_by_another(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", constant(3, 3))
    with serving_of(tmp_path / "model") as service:
        assert service.client.post("/predict?top=1", content=picture()).json()["classes"][0]["class"] == "class 3"
        assert service.client.get("/model").json()["round"] == 3
        write_folder(tmp_path / "model", constant(5, 4))
        while service.client.get("/health").json()["round"] != 5:
            pass
        assert service.client.post("/predict?top=1", content=picture()).json()["classes"][0]["class"] == "class 4"


@pytest.mark.slow
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
def test_no_request_is_dropped_while_models_replace_each_other(folder: Path) -> None:
    """The model of round r answers class r mod 10, so that an answer of two models at once would show."""
    last, results, failures = 28, [], []
    over = threading.Event()

    def ask(service: Service, seed: int) -> None:
        with httpx.Client(base_url=service.client.base_url, timeout=None) as client:
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
    assert {7, 14, 21, 28} <= {each["round"] for each in results}


@pytest.mark.slow
def test_a_request_in_flight_is_answered_before_the_end(folder: Path) -> None:
    """Half of a body is sent before SIGTERM, the rest once the service no longer takes connections."""
    body = picture(size=(200, 200))
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
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
        assert service.process.wait() == 0


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_an_address_that_cannot_be_had_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = predict("serve", "--state", folder, "--port", port)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --port {port}: cannot listen there")
    assert predict("serve", "--state", folder, "--port", 99999).returncode == 2
