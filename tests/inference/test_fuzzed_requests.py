"""Whatever others send as a picture becomes a square or a documented refusal."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.made.models import constant, picture
from support.systems.service import living

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.errors import DataError
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.inference.service import Watched, application

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of what the fuzzed pictures hold

fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


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
    *(picture(kind, (9, 7)) for kind in pixels.FORMATS),
    picture("PNG", (9, 7), "P"),
    picture("JPEG", (9, 7), "L"),
    picture("WEBP", (9, 7), "RGBA"),
]


@st.composite
def bodies(draw: Callable[..., Any]) -> bytes:
    """Pictures that have suffered, and bytes that never were one."""
    if draw(st.integers(0, 4)) == 0:
        return bytes(draw(st.binary(max_size=300)))
    return damaged(draw, draw(st.sampled_from(SOUND)))


@fuzzed
@given(bodies())
def test_any_bytes_become_a_square_or_a_line_that_says_why_not(body: bytes) -> None:
    try:
        square = read_square(body, Framing.of_files(16), memory=100_000)
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
        service = application(watched)
        life = living(service)
        runner.run(life.__aenter__())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://localhost")
        yield lambda **content: runner.run(client.post("/predict", **content))
        runner.run(client.aclose())
        runner.run(life.__aexit__(None, None, None))


@fuzzed
@given(body=bodies(), kind=st.sampled_from(["", "image/png", "text/plain"]), top=st.text(max_size=8))
def test_any_body_is_answered_as_documented(post: Post, body: bytes, kind: str, top: str) -> None:
    reply = post(params={"top": top}, content=body, headers={"content-type": kind})
    if reply.status_code == 200:
        assert reply.json()["classes"][0]["class"] == "class 1"
    else:
        assert reply.status_code == 422, reply.text
        assert list(reply.json()) == ["error"] and "\n" not in reply.json()["error"]


def test_the_fuzzed_pictures_are_sound_before_they_suffer() -> None:
    for sound in SOUND:
        assert read_square(sound, Framing.of_files(16)).shape == (3, 16, 16)
