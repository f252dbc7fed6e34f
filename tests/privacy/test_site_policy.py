"""A site's policy: what a server can no longer ask of a client."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MessageType
from hypothesis import given
from hypothesis import strategies as st
from support.common import SMALL, rounds_of
from support.made.parsers import Parsers
from support.systems.federation import ROOT
from support.systems.in_process import Federation

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import PolicyError, RunError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.privacy.site_policy import VARIABLE, SitePolicy, policy_of_site, read_policy
from fedkace_flwr.registry import METHODS

Make = Callable[..., Config]
STRICT = """
labels = false
unlisted = "default"

[keys]
method = ["fedkace", "er", "as3"]
dp = "local"
dp-noise = { min = 0.5 }
dp-clip = { min = 0.1, max = 5 }
dp-seeded = true
report-classes = false
epochs = { max = 3 }
rounds = { max = 4 }
clients = [2, 3]
width = { max = 8 }
capacity = { max = 60 }
samples-per-class = { max = 30 }
seed = { min = 0 }
inbox-after = "keep"
"""
ACCEPTED = {"dp": "local", "dp_noise": 1.0, "dp_seeded": True}


@pytest.fixture
def policy(tmp_path: Path) -> Callable[[str], Path]:
    path = tmp_path / "policy.toml"

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


def stored(config: Config) -> list[Path]:
    """Everything that clients have stored for a run."""
    return list((Path(config.run.results_dir) / config.run.run_name / "clients").rglob("*.npz"))


@pytest.mark.slow
def test_a_run_that_every_site_accepts_gives_the_same_numbers_as_without_policies(
    small: Make, policy: Callable[[str], Path]
) -> None:
    path = policy(STRICT)
    for name, own in (("with", {"policy": str(path)}), ("without", {})):
        node = {**own, "state-dir": str(path.parent / f"state-{name}")}
        run_inline(small(run_name=name, **ACCEPTED), node_config=lambda _, node=node: node)  # type: ignore[misc]
    folder = path.parent
    assert rounds_of(folder / "with") == rounds_of(folder / "without")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": "none"}, "dp = 'none': this site accepts only 'local'"),
        ({"dp": "central"}, "dp = 'central': this site accepts only 'local'"),
        ({"dp_noise": 0.0}, "dp-noise = 0.0: this site accepts at least 0.5"),
        ({"dp_noise": 0.4999}, "dp-noise = 0.4999: this site accepts at least 0.5"),
        ({"dp_clip": 1e9}, "dp-clip = 1000000000.0: this site accepts 0.1 to 5.0"),
        ({"epochs": 4}, "epochs = 4: this site accepts at most 3"),
        ({"rounds": 5}, "rounds = 5: this site accepts 1 to 4"),
        ({"clients": 4}, "clients = 4: this site accepts only 2 or 3"),
        ({"method": "fedavg"}, "method = 'fedavg': this site accepts only 'fedkace' or 'er' or 'as3'"),
        ({"inbox_after": "delete"}, "inbox-after = 'delete': this site accepts only 'keep'"),
        (
            {"batchnorm-statistics": "local"},
            "batchnorm-statistics = 'local': this site accepts only its default, 'shared'",
        ),
        ({"batch_size": 2}, "batch-size = 2: this site accepts only its default, 32 (unlisted = 'default')"),
        ({"threads": 64}, "threads = 64: this site accepts only its default, 1 (unlisted = 'default')"),
        ({"keep_models": "always"}, "keep-models = 'always': this site accepts only its default, 'auto'"),
    ],
)
def test_a_refused_run_fails_in_one_line_before_anything_is_trained(
    changes: dict[str, Any], words: str, small: Make, policy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, config = policy(STRICT), small(**{**ACCEPTED, **changes})
    own = {"policy": str(path), "state-dir": str(path.parent / "state")}
    with caplog.at_level(logging.ERROR), pytest.raises(RunError) as caught:
        run_inline(config, node_config=lambda _: own)
    assert f"PolicyError: {path}: {words}" in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert f"PolicyError: {path}: {words}" in caplog.text, "the site's own log says it, too"
    assert stored(config) == [] and not list(path.parent.glob("state/**/*.npz"))


@pytest.mark.parametrize("key", ["rounds", "threads", "num-classes", "test-per-class"])
def test_no_limit_is_more_than_any_limit(key: str, policy: Callable[[str], Path]) -> None:
    inbox = {"dataset": "inbox", "class-names": "a,b", "image-size": 8}
    endless = Config.parse({**(inbox if key == "rounds" else {}), key: 0})
    accepting = read_policy(policy(f"[keys]\n{key} = {{ min = 0, max = 4 }}"))
    accepting.check(endless, endless, sends_labels=False)
    with pytest.raises(PolicyError, match=f"{key} = 0: this site accepts 1 to 4"):
        read_policy(policy(f"[keys]\n{key} = {{ max = 4 }}")).check(endless, endless, sends_labels=False)


def test_a_server_names_no_folder_on_a_machine_with_keys_at_their_defaults(
    small: Make, policy: Callable[[str], Path]
) -> None:
    path = policy(
        'unlisted = "default"\n[keys]\n' + "".join(f"{key} = {json.dumps(value)}\n" for key, value in SMALL.items())
    )
    config = small()
    with pytest.raises(RunError, match=f"results-dir = '{config.run.results_dir}': this site accepts only its default"):
        run_inline(config, node_config=lambda _: {"policy": str(path)})
    own = {"policy": str(path), "state-dir": str(path.parent / "state")}
    run_inline(small(run_name="other", resume=True, deadline=50, on_alarm="true"), node_config=lambda _: own)


@pytest.mark.matrix
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.sends_labels])
def test_no_method_gets_labels_from_a_site_that_does_not_give_them(
    method: str, small: Make, policy: Callable[[str], Path]
) -> None:
    path, config = policy("labels = false"), small(method=method)
    with pytest.raises(RunError, match="this site accepts no method that sends labels of samples"):
        run_inline(config, node_config=lambda _: {"policy": str(path)})
    assert stored(config) == []
    run_inline(small(method="er"), node_config=lambda _: {"policy": str(path)})


@pytest.mark.parametrize("method", ["fedkace", "fedcbdr", "tfcl"])
def test_every_message_of_a_refused_run_is_refused(
    method: str, small: Make, policy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(policy("[keys]\nepochs = { max = 1 }\n")))
    federation = Federation(small(method=method, epochs=2))
    kinds = [MessageType.TRAIN, MessageType.EVALUATE, f"query.{wire.WORKING}", *METHODS[method].actions]
    for kind in kinds:
        reply = federation.send(kind, 0, 1)
        assert reply.has_error(), kind
        assert "PolicyError: " in wire.root_cause(reply.error.reason), kind
    assert stored(federation.config) == []


def test_masked_training_is_refused_before_keys_are_exchanged(small: Make, policy: Callable[[str], Path]) -> None:
    path = policy("[keys]\nclients = { min = 9 }\n")
    with pytest.raises(RunError, match="clients = 3: this site accepts at least 9"):
        run_inline(small(secagg=True), node_config=lambda _: {"policy": str(path)})


def test_a_site_refuses_for_itself_alone(small: Make, policy: Callable[[str], Path]) -> None:
    path = policy("[keys]\nepochs = { max = 1 }\n")
    config = small(epochs=2, quorum=0.5)
    run_inline(config, node_config=lambda partition: {"policy": str(path)} if partition == 1 else {})
    records = rounds_of(path.parent / "run")
    assert len(records) == config.stream.rounds
    failures = [failure for record in records for failure in record["failures"]]
    assert {failure["client"] for failure in failures} == {1}
    reason = f"PolicyError: {path}: epochs = 2: this site accepts at most 1"
    assert all(failure["reason"].endswith(reason) for failure in failures)
    assert {file.parent.name for file in stored(config)} == {"client-000", "client-002"}


def test_a_key_that_a_method_presets_counts_as_the_client_uses_it(small: Make, policy: Callable[[str], Path]) -> None:
    """The ablations AS2 and AS3 preset ``predict-with``; unlisted keys are compared as the server sends them."""
    read = read_policy(policy('[keys]\npredict-with = ["auto", "local"]\n'))
    for name, accepted in (("fedkace", True), ("as3", True), ("as2", False)):
        asked = Config.parse({"method": name})
        method, config = configured(asked)
        assert _accepts(lambda: read.check(asked, config, sends_labels=method.sends_labels)) is accepted  # noqa: B023
    read = read_policy(policy('unlisted = "default"\n[keys]\nmethod = "as2"\n'))
    asked = Config.parse({"method": "as2"})
    read.check(asked, configured(asked)[1], sends_labels=False)


def _accepts(check: Callable[[], None]) -> bool:
    try:
        check()
    except PolicyError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("labels = 1", "labels = 1: must be true or false"),
        ("unlisted = 'defaults'", "must be 'any' or 'default'; did you mean default?"),
        (
            "label = true",
            "unknown entry 'label'; must be one of keys, labels, new-classes, unlisted; did you mean labels?",
        ),
        ("keys = 3", "keys = 3: must be a table"),
        ("[keys]\nepoch = 1", "unknown key 'epoch'; did you mean epochs?"),
        ("[keys]\nepochs = '1'", "epochs = '1': must be a whole number"),
        ("[keys]\nepochs = {max = 0}", "epochs, max = 0: must be >= 1"),
        ("[keys]\nepochs = {most = 3}", "epochs = {'most': 3}: must be a value or a list of values, or min and max"),
        ("[keys]\nepochs = []", "epochs = []: must name at least one value"),
        ("[keys]\nepochs = {min = 3, max = 2}", "epochs: min = 3 is larger than max = 2"),
        ("[keys]\ndp = {min = 'local'}", "dp = {'min': 'local'}: must be a value or a list of values"),
        ("[keys]\ndp-noise = nan", "dp-noise = nan: must be finite"),
        ("[keys]\nmethod = ['er', 'fedkase']", "did you mean fedkace?"),
        ("a = " + "[" * 10**5, "is not valid TOML"),
        ("#" * 2**20 + "#", "cannot be read (it has 1048577 bytes; at most 1048576 are read)"),
    ],
)
def test_a_policy_with_a_mistake_accepts_no_run(
    text: str, words: str, small: Make, policy: Callable[[str], Path]
) -> None:
    path = policy(text)
    with pytest.raises(RunError, match=f"PolicyError: {re.escape(str(path))}: ") as caught:
        run_inline(small(), node_config=lambda _: {"policy": str(path)})
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_the_example_of_the_page_accepts_what_it_says(policy: Callable[[str], Path]) -> None:
    page = (ROOT / "docs" / "signed-apps.md").read_text()
    (text,) = re.findall(r"```toml\n# /etc/fedkace/policy.toml\n(.*?)```", page, re.DOTALL)
    read = read_policy(policy(text))
    good = {"method": "er", "dataset": "inbox", "class-names": "cat,dog,sea lion", "image-size": 32, "clients": 5}
    good |= {"dp": "local", "dp-noise": 2.0, "deadline": 600.0, "run-name": "a"}
    _check(read, good)
    _check(replace(read, own_state=True), {**good, "state-dir": "/b", "results-dir": "c"})
    with pytest.raises(PolicyError) as caught:
        _check(read, {**good, "dp-noise": 0.1})
    refusal = f"PolicyError: {str(caught.value).replace(str(read.path), '/etc/fedkace/policy.toml')}\n"
    assert refusal in page
    others: dict[str, Any] = {
        "state-dir": "/b",
        "results-dir": "c",
        "threads": 9,
        "dp": "none",
        "method": "fedavg",
        "defence": "on",
        "epochs": 6,
        "width": 17,
        "image-size": 64,
    }
    for key, value in others.items():
        with pytest.raises(PolicyError, match=f"{key} = "):
            _check(read, {**good, key: value})


def _check(read: SitePolicy, values: dict[str, Any]) -> None:
    asked = Config.parse(values)
    method, config = configured(asked)
    read.check(asked, config, sends_labels=method.sends_labels)


def test_a_policy_that_is_missing_accepts_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"cannot be read \(No such file or directory\)"):
        policy_of_site({"policy": str(tmp_path / "none")})
    with pytest.raises(PolicyError, match="cannot be read"):
        read_policy(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert policy_of_site({}) is None and policy_of_site({"policy": ""}) is None


def test_the_node_config_comes_before_the_environment(
    policy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    found = policy_of_site({"policy": str(policy("labels = false"))})
    assert found is not None and not found.labels


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value) if not isinstance(value, float) else repr(value)


ENTRIES = st.booleans() | st.integers() | st.floats() | st.sampled_from(["local", "none", "fedkace", ""])
BOUNDS = st.dictionaries(st.sampled_from(["min", "max", "x"]), ENTRIES, max_size=2)


@pytest.mark.exhaustive
@given(st.dictionaries(st.sampled_from(sorted(Config().flat())), ENTRIES | BOUNDS, max_size=4))
def test_whatever_a_policy_says_of_keys_it_decides_on_every_run(entries: dict[str, Any]) -> None:
    lines = [f"{name} = {_toml(value)}" for name, value in entries.items()]
    parsers = Parsers()
    try:
        parsers.policy("\n".join(["[keys]", *lines]).encode())
    finally:
        parsers.close()
