"""Where the service listens: a port of the loopback, or a Unix socket."""

import stat
from pathlib import Path

import httpx
import pytest
from support.made.models import picture
from support.systems.service import serving_at

from fedkace_flwr.inference.predict import main
from fedkace_flwr.inference.server import listening


@pytest.mark.slow
def test_the_service_answers_on_a_unix_socket_that_it_removes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "predict"
    with serving_at(folder, path) as process:
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.post("/predict", content=picture()).status_code == 200
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421
        process.terminate()
        assert process.wait() == 0
    assert not path.exists()


def test_a_unix_socket_is_taken_over_only_if_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "predict"
    first, shown = listening(0, path)
    assert shown == f"unix:{path}"
    with pytest.raises(OSError, match=rf"^--socket {path}: cannot listen there \(Address already in use\)"):
        listening(0, path)
    first.close()
    second, _ = listening(0, path)
    second.close()


def test_a_file_in_the_place_of_a_unix_socket_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    assert main(["serve", "--state", str(folder), "--socket", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --socket {path}: cannot listen there")
    assert path.read_text() == "mine"
