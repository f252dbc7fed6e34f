"""nginx in front of the prediction service: a good caller is answered while another floods it.

The real nginx runs with ``deploy/nginx-predict.conf`` in front of the real service. Addresses of the loopback stand for
those of callers. ``-s`` shows the seconds that the good caller waited.
"""

import http.client
import json
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.made.models import constant, picture
from support.systems.proxy import Authority, Front
from support.systems.service import serving_at
from support.tools import need_tools

from fedkace_flwr.inference import model_files as serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("nginx")]

ATTACK = """
import json, socket, sys, time
port, count = int(sys.argv[1]), int(sys.argv[2])
body = open(sys.argv[3], "rb").read()
request = b"POST /predict HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body
print("begun", flush=True)
begun = time.monotonic()
for number in range(count):
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.3", 0)) as raw:
        raw.sendall(request)
    ahead = number / 1000 - (time.monotonic() - begun)
    if ahead > 0:
        time.sleep(ahead)
print(count / (time.monotonic() - begun))
"""
COUNT = 8000


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    need_tools("nginx")
    folder = tmp_path_factory.mktemp("front")
    serving.write(folder / "client", constant(3, 3))
    authority = Authority(folder)
    with (
        serving_at(folder / "client", folder / "predict"),
        Front(folder / "nginx", authority.folder, folder / "predict") as made,
    ):
        yield made


def asked(
    front: Front, body: bytes = b"", method: str = "POST", target: str = "/predict", caller: str = "127.0.0.2"
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", front.second, timeout=60, source_address=(caller, 0))
    connection.request(method, target, body)
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_what_the_service_answers_gets_through_with_tls_and_nothing_else(front: Front) -> None:
    context = ssl.create_default_context(cafile=str(front.certificates / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", front.port, timeout=60, context=context)
    connection.request("POST", "/predict?top=1", picture(), {"Host": "hub.example"})
    found = json.loads(connection.getresponse().read())
    assert [each["class"] for each in found["classes"]] == ["class 3"]
    for target in ("/health", "/model"):
        assert asked(front, method="GET", target=target).status == 200
    assert asked(front, method="GET").status == asked(front, target="/health").status == 403
    assert asked(front, target="/elsewhere").status == 404
    assert asked(front, bytes(11_000_000)).status == 413


def test_an_address_has_a_limited_rate(front: Front) -> None:
    statuses = [asked(front, method="GET", target="/health", caller="127.0.0.4").status for _ in range(60)]
    assert set(statuses) == {200, 429} and statuses[:20] == [200] * 20
    assert asked(front, method="GET", target="/health", caller="127.0.0.5").status == 200, "another is not affected"


def test_a_good_caller_is_answered_while_another_sends_pictures_and_hangs_up(front: Front, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(picture("JPEG", (640, 480)))
    good, seconds = picture("JPEG", (640, 480), seed=1), list[float]()
    command = [sys.executable, "-c", ATTACK, str(front.second), str(COUNT), str(tmp_path / "picture")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None and attacker.stdout.readline() == "begun\n"
        while attacker.poll() is None:
            begun = time.monotonic()
            answer = asked(front, good, caller=f"127.0.1.{1 + len(seconds) % 200}")
            seconds.append(time.monotonic() - begun)
            assert answer.status == 200
        rate = float(attacker.stdout.readline())
    assert attacker.returncode == 0 and len(seconds) > 2
    print(
        f"\n{COUNT} pictures were sent and left, {rate:.0f} a second; {len(seconds)} good ones were answered after "
        f"{statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s"
    )
