"""Names that become a part of a path, and texts that are shown."""

import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import LONGEST_NAME, is_plain_name
from fedkace_flwr.storage.names import fitted, printable, token, without_paths
from fedkace_flwr.storage.paths import client_folder, run_folder

ANY = st.text(st.characters(), max_size=300) | st.text("ab./\\~\n\0 é\ud800", max_size=300)
HOSTILE = ["../../x", ".", "/tmp/x", "a\\b", "a\0b", "\x1b[31m", "\ud800", " \t", "n" * (LONGEST_NAME + 1)]


@pytest.mark.matrix
@pytest.mark.parametrize("name", HOSTILE)
def test_a_run_cannot_leave_the_results_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run-name = .*: must be a plain name") as caught:
        Config.parse({"results-dir": str(tmp_path), "run-name": name})
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["fedkace_overlap-4_seed-0", "K=4, M=[0, 1]", "\u00dcbung 1", "x" * LONGEST_NAME])
def test_a_plain_name_is_a_folder_in_the_results_folder(name: str, tmp_path: Path) -> None:
    config = Config.parse({"results-dir": str(tmp_path), "run-name": name})
    assert run_folder(config, 5) == tmp_path / name
    assert run_folder(Config.parse({"results-dir": str(tmp_path), "run-name": ""}), 5) == tmp_path / "run-5"


@pytest.mark.parametrize("client", [-1, 10, 10**300])
def test_a_client_that_the_run_does_not_have_has_no_folder(client: int, tmp_path: Path) -> None:
    """Its number comes from the server."""
    with pytest.raises(ConfigError, match="the run has clients 0 to 9"):
        client_folder(Config.parse({"results-dir": str(tmp_path)}), 5, client, {"num-partitions": 10})


def test_a_folder_of_clients_cannot_be_taken_for_that_of_earlier_runs(tmp_path: Path) -> None:
    config = Config.parse({"state-dir": str(tmp_path / "earlier")})
    with pytest.raises(ConfigError, match=r"state-dir = .*must not end in 'earlier'"):
        client_folder(config, 5, 0, {"num-partitions": 10})
    place: dict[str, Any] = {"num-partitions": 10, "state-dir": str(tmp_path / "earlier"), "client-name": "cam7"}
    with pytest.raises(ConfigError, match=r"state-dir = .*must not end in 'earlier'"):
        client_folder(Config(), 5, 0, place)


@given(ANY)
def test_a_plain_name_makes_a_path_in_its_folder(name: str) -> None:
    if is_plain_name(name):
        assert Path(os.path.normpath(Path("/folder") / name)).parent == Path("/folder")
        assert not any(unicodedata.category(sign).startswith("C") for sign in name)


@given(ANY)
def test_a_token_is_a_plain_name_and_tells_texts_apart(text: str) -> None:
    assert is_plain_name(token(text)) and len(token(text)) <= 64
    assert token(text) != token(f"{text}x") and token(token(text)) == token(text)


@given(ANY)
def test_what_is_shown_is_one_printable_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    shown.encode()
    assert not text.isprintable() or shown == text


@given(st.text("abé\udcff.~ \U0001f600", min_size=1, max_size=300), st.integers(40, 255))
def test_a_name_is_fitted_and_stays_apart_from_others(name: str, most: int) -> None:
    short = fitted(name, most)
    assert 0 < len(os.fsencode(short)) <= most
    if len(os.fsencode(name)) <= most:
        assert short == name
    else:
        assert fitted(f"a{name}", most) != short
        suffix = Path(name).suffix
        assert not suffix or len(os.fsencode(suffix)) > 16 or short.endswith(suffix)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("inbox = /home/x/My data/inbox: cannot be read", "inbox = inbox: cannot be read"),
        ("[Errno 2] No such file: '/home/x/a b.png'", "[Errno 2] No such file: 'a b.png'"),
        ("~/data/x.pth, ~bob/y/ and file:///home/x/z", "x.pth, y and z"),
        ("from /a/b to /c/d", "from b to d"),
        ("https://example.org/a/b, and/or uoft-cs/cifar100, ./a/b, 1 / 2, </i>",) * 2,
    ],
)
def test_a_path_in_a_text_is_cut_to_its_name(text: str, shown: str) -> None:
    assert without_paths(text) == shown
