"""Classes that nobody has named yet: their files wait, their names go to the server, and then they are learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType
from support.common import rounds_of
from support.made.inboxes import CLASSES, drop, names_in, numbers_of, opened, picture

from fedkace_flwr import server_app
from fedkace_flwr.client_app import app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr.export.loading import load_model
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.messaging import wire

Make = Callable[..., Config]


def named(folder: Path, name: str, *names: str) -> None:
    """Write one file with names of classes as labels; the first pixel of a sample is its class's number in a to d."""
    pixels = np.zeros((len(names), 2, 2, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = [ord(each[0]) - ord("a") for each in names]
    (folder / "new").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "new" / name, images=pixels, labels=np.array(names))


def test_files_of_unknown_classes_wait_and_do_not_count_for_the_bound(tmp_path: Path) -> None:
    named(tmp_path, "1.npz", "d", "d", "d")
    named(tmp_path, "2.npz", "a", "d")  # one of them is known: it waits as a whole
    picture(tmp_path / "new" / "fish" / "x.png")
    drop(tmp_path, "3.npz", 1, 2, 3, 4)
    box = opened(tmp_path, bound=4, strangers="wait")
    assert numbers_of(box.take(1, 0)) == [1, 2, 3, 4]
    box.learned(1)
    assert names_in(tmp_path / "new") == ["1.npz", "2.npz", "fish/x.png"]
    assert box.new_classes(9) == ["d", "fish"] and box.new_classes(1) == ["d"]
    told = opened(tmp_path, bound=4, strangers="wait", class_names=(*CLASSES, "d"))
    assert told.take(2, 1)[1].tolist() == [3, 3, 3]
    told.learned(2)
    assert told.take(3, 2)[1].tolist() == [0, 3]
    assert told.new_classes(9) == ["fish"]
    assert names_in(tmp_path / "rejected") == []


def test_labels_beyond_the_agreed_classes_and_impossible_names_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    np.savez(tmp_path / "new" / "label.npz", images=np.zeros((1, 2, 2), np.uint8), labels=np.array([3]))
    named(tmp_path, "comma.npz", "a,b")
    picture(tmp_path / "new" / " fish" / "x.png")
    box = opened(tmp_path, strangers="wait")
    assert box.new_classes(9) == [] and len(box.take(1, 0)[1]) == 0
    reasons = {path.name: path.read_text() for path in (tmp_path / "rejected").glob("*.reason.txt")}
    assert "label 3 is not one of the 3 agreed" in reasons["label.npz.reason.txt"]
    assert "'a,b': must be" in reasons["comma.npz.reason.txt"] and "' fish'" in reasons["x.png.reason.txt"]


def test_a_site_that_lets_no_names_leave_rejects_and_says_why(tmp_path: Path) -> None:
    named(tmp_path, "1.npz", "d")
    box = opened(tmp_path, strangers="keep secret")
    assert box.new_classes(9) == [] and len(box.take(1, 0)[1]) == 0
    assert "new-classes = 'refuse'" in (tmp_path / "rejected" / "1.npz.reason.txt").read_text()


def test_what_another_run_took_but_knows_no_longer_waits(tmp_path: Path) -> None:
    named(tmp_path, "1.npz", "d", "d")
    opened(tmp_path, "earlier", strangers="wait", class_names=(*CLASSES, "d")).take(1, 0)
    assert names_in(tmp_path) == ["taken/earlier-000001/1.npz"]
    assert len(opened(tmp_path, strangers="wait").take(1, 0)[1]) == 0
    assert names_in(tmp_path) == ["new/1.npz"]


# Whole runs


def arrive(home: Path, client: int, name: str, **classes: int) -> None:
    """Some images of each class, all different, as a file in a client's inbox; the class's first letter is in them."""
    labels = [each for each, count in classes.items() for _ in range(count)]
    images = np.random.default_rng([client, *name.encode()]).integers(0, 256, (len(labels), 8, 8), np.uint8)
    images[:, 0, 0] = [ord(each[0]) for each in labels]
    folder = home / f"client-{client}" / "new"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, images=images, labels=np.array(labels))


def at(home: Path) -> Callable[[int], dict[str, str]]:
    return lambda client: {wire.INBOX: str(home / f"client-{client}")}


def living(make: Make, **changes: Any) -> Config:
    told = {"classes": "open", "max_classes": 5, "class_names": "ok", "clients": 2, "method": "er", "rounds": 4}
    told["round_samples"] = 0  # rounds without new samples are rounds as well
    return make(dataset="inbox", image_size=8, normalise=False, **{**told, **changes})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two devices that bring the same new name in one round, and one of them another one."""
    for client in range(2):
        arrive(tmp_path / "data", client, "1.npz", ok=4)
        arrive(tmp_path / "data", client, "2.npz", hole=4)
    arrive(tmp_path / "data", 1, "3.npz", dent=2)
    return tmp_path / "data"


def test_two_devices_with_one_new_name_learn_it_under_one_number(small: Make, home: Path, tmp_path: Path) -> None:
    config = living(small, keep_models="always")
    run_inline(config, node_config=at(home))
    lines = rounds_of(tmp_path / "run")
    assert [line.get("new_classes") for line in lines] == [["dent", "hole"], None, None, None]
    assert lines[0]["buffer_classes"] == [[4, 0, 0, 0, 0]] * 2
    assert lines[1]["buffer_classes"] == [[4, 0, 4, 0, 0], [4, 2, 4, 0, 0]]
    assert lines[2]["sat_out"] == [0, 1]
    assert names_in(home / "client-0" / "new") == names_in(home / "client-0" / "rejected") == []
    kept = load_newest(tmp_path / "run" / "clients" / "client-000").kept
    assert kept.class_names == ("ok", "dent", "hole") and kept.seen == (0, 2)
    model = load_model(tmp_path / "run" / "model")
    assert model.class_names == ("ok", "dent", "hole")
    assert model.predict(np.zeros((1, 8, 8, 3), np.uint8)).probabilities.shape == (1, 3)


def test_a_name_comes_also_with_an_evaluation_and_from_a_client_that_sits_out(
    small: Make, home: Path, tmp_path: Path
) -> None:
    """Client 0 has nothing else; the file of client 1 arrives when its training is over."""
    config = living(small, class_names="", rounds=3)

    class Late(InlineGrid):
        def _answer(self, message: Message) -> Message:
            told = message.content.config_records[wire.CONFIG]
            place = message.metadata.message_type, told.get(wire.ROUND), told.get(wire.CLIENT)
            if place == (MessageType.EVALUATE, 1, 1):
                arrive(home, 1, "4.npz", crack=2)
            return super()._answer(message)

    server_app.run(Late(app, 2, config.flat(), 1, at(home)), config, 1)
    lines = rounds_of(tmp_path / "run")
    assert lines[0]["sat_out"] == [0, 1] and lines[0]["new_classes"] == ["crack", "dent", "hole", "ok"]
    assert lines[1]["buffer_classes"] == [[0, 0, 4, 4, 0], [2, 2, 4, 4, 0]]


def test_a_server_killed_before_it_has_settled_is_told_again_and_nothing_is_learned_twice(
    small: Make, home: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    for client in range(2):
        arrive(whole, client, "1.npz", ok=4)
        arrive(whole, client, "2.npz", hole=4)
    arrive(whole, 1, "3.npz", dent=2)
    run_inline(living(small, run_name="uncut"), node_config=at(whole))
    config = living(small, run_name="cut", resume=True)

    class Killed(InlineGrid):
        left = 0

        def _answer(self, message: Message) -> Message:
            self.left -= wire.ROUND in message.content.config_records[wire.CONFIG]
            if self.left < 0:
                raise SystemExit("killed")
            return super()._answer(message)

    for left in (3, 4, 6):
        grid = Killed(app, 2, config.flat(), 1, at(home))
        grid.left = left
        with pytest.raises(SystemExit):
            server_app.run(grid, config, 1)
    run_inline(config, node_config=at(home))
    assert rounds_of(tmp_path / "cut") == rounds_of(tmp_path / "uncut")


def test_when_all_numbers_are_given_further_classes_wait(
    small: Make, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_inline(living(small, max_classes=2), node_config=at(home))
    assert rounds_of(tmp_path / "run")[0]["new_classes"] == ["dent"]
    assert names_in(home / "client-0" / "new") == ["2.npz"]
    assert sum("class hole, brought by" in record.getMessage() for record in caplog.records) == 1


def test_a_site_refuses_to_tell_and_the_others_learn(small: Make, home: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('new-classes = "refuse"\n')

    def node(client: int) -> dict[str, str]:
        return at(home)(client) | ({"policy": str(policy)} if client == 1 else {})

    run_inline(living(small), node_config=node)
    lines = rounds_of(tmp_path / "run")
    assert lines[0]["new_classes"] == ["hole"]
    reasons = [path.read_text() for path in (home / "client-1" / "rejected").glob("*.reason.txt")]
    assert len(reasons) == 2 and all("new-classes = 'refuse'" in reason for reason in reasons)


def test_without_a_name_nothing_is_learned_and_no_model_is_left(
    small: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run_inline(living(small, class_names="", rounds=1), node_config=at(tmp_path / "data"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 1
    assert "no class had a name yet" in caplog.text and not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class_names": "a,a"}, "class-names = 'a,a'"),
        ({"class_names": "a,.b"}, "class-names = 'a,.b'"),
        ({"class_names": "a,b,c", "max_classes": 2}, "max-classes = 2"),
        ({"max_classes": 21}, "capacity = 20: must be at least max-classes = 21"),
    ],
)
def test_what_open_classes_need_is_asked_for_before_any_round(small: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        living(small, **changes)
