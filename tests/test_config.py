"""The configuration: what it takes, what it refuses and in which words, and the files that must agree with it."""

import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made.keys import KEYS

from fedkace_flwr import client_app, config_docs
from fedkace_flwr.config import Config, check_value
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.former_keys import renewed
from fedkace_flwr.registry import METHODS

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


NUMBERS = sorted(name for name, (default, _) in KEYS.items() if type(default) in (int, float))
CHOICES = sorted(name for name, (_, key) in KEYS.items() if key.choices)
FLOATS = sorted(name for name, (default, _) in KEYS.items() if type(default) is float)


def refusal(values: dict[str, Any]) -> str:
    """The message with which a configuration is refused; one line, whatever the value."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(values)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def with_company(name: str, value: Any) -> dict[str, Any]:
    """The value, with what other keys must be so that it contradicts none of them."""
    if name == "overlap":
        return {"window": max(1, value), name: value}
    if name == "rounds" and value == 0:
        return {"dataset": "inbox", "class-names": "a,b", "image-size": 8, name: value}
    if name == "first-class":
        return {"num-classes": 2, name: value}
    if name == "num-classes":
        return {"capacity": max(60, value), "window": 1, name: value}
    return {name: value}


def inside(name: str) -> st.SearchStrategy[Any]:
    default, key = KEYS[name]
    if key.choices:
        return st.sampled_from(key.choices)
    if type(default) is bool:
        return st.booleans()
    if name == "away":
        return st.sampled_from(["", "0:1-", "0:2-3, 0:5-5"])
    if type(default) is str:
        return st.text(max_size=20).filter(key.allows)
    if type(default) is int:
        low = int(key.low) if key.low is not None else int(key.above) + 1  # type: ignore[arg-type]
        return st.integers(low, int(key.high) if key.high is not None else low + 10**5)
    return st.floats(
        key.low if key.low is not None else key.above,
        key.high,
        exclude_min=key.low is None and key.above is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def outside(name: str) -> st.SearchStrategy[Any]:
    """Values just beyond the ends of a key's range, and far beyond."""
    default, key = KEYS[name]
    whole = type(default) is int
    sides: list[st.SearchStrategy[Any]] = []
    if key.low is not None and whole:
        sides.append(st.just(int(key.low) - 1) | st.integers(max_value=int(key.low) - 1))
    elif key.low is not None:
        last = math.nextafter(key.low, -math.inf)
        sides.append(st.just(last) | st.floats(max_value=last))
    if key.above is not None:
        sides.append(st.just(float(key.above)) | st.floats(max_value=key.above))
    if key.high is not None and whole:
        sides.append(st.just(int(key.high) + 1) | st.integers(min_value=int(key.high) + 1))
    elif key.high is not None:
        first = math.nextafter(key.high, math.inf)
        sides.append(st.just(first) | st.floats(min_value=first))
    return st.one_of(sides)


def test_the_test_sees_every_key() -> None:
    assert set(KEYS) == set(Config().flat())
    assert {"seed", "overlap", "method", "learning-rate"} <= set(KEYS)


def test_defaults_parse_and_come_back() -> None:
    assert Config.parse({}) == Config()
    assert Config.parse(Config().flat()) == Config()
    assert Config.parse({}).flat() == Config().flat()


@pytest.mark.parametrize(
    ("method", "unread"),
    [("fedprox", {"lambda-max": 5.0}), ("fedkace", {"fedprox-mu": 0.5}), ("as4", {"fedprox-mu": 0.5})],
)
def test_a_configuration_tells_which_of_its_keys_only_other_methods_read(method: str, unread: dict[str, float]) -> None:
    given = {"method": method, "lambda-max": 5.0, "fedprox-mu": 0.5, "rounds": 3}
    assert Config.parse(given).unread == unread


def test_keys_of_inboxes_have_no_effect_elsewhere() -> None:
    assert Config.parse({"round-interval": 60, "inbox-bound": 5}).unread == {"round-interval": 60.0, "inbox-bound": 5}


def test_a_run_warns_of_a_key_that_its_method_does_not_read(
    small: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    run_inline(small(method="fedprox", lambda_max=5.0, fedprox_mu=0.5, rounds=1))
    (warning,) = (record.getMessage() for record in caplog.records if "no effect" in record.getMessage())
    assert (
        warning == "lambda-max = 5.0 has no effect with method = 'fedprox', dataset = 'digits' and network = 'resnet18'"
    )


@pytest.mark.matrix
@pytest.mark.parametrize("name", KEYS)
def test_each_default_parses_alone_and_is_in_its_own_range(name: str) -> None:
    default, key = KEYS[name]
    assert key.allows(default)
    assert Config.parse({name: default}) == Config()


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Values for any keys, those that are held against each other drawn so that they fit."""
    together = ("num-classes", "first-class", "window", "overlap", "samples-per-class", "capacity")
    # These go with some methods, rules, numbers of clients or capacities alone: test_privacy.py, test_attacks.py,
    # test_open_classes.py.
    elsewhere = {"dp", "dp-seeded", "secagg", "batchnorm-statistics", "attack", "hostile-clients", "aggregation"}
    elsewhere |= {"classes", "optimiser"}
    names = draw(st.lists(st.sampled_from(sorted(set(KEYS) - {*together, *elsewhere})), unique=True, max_size=8))
    classes = draw(st.integers(1, 1000))
    window = draw(st.integers(1, classes))
    fitting = (
        classes,
        draw(st.integers(0, 1000)),
        window,
        draw(st.integers(0, window)),
        draw(st.integers(2, 500)),
        classes + draw(st.integers(0, 98_000)),
    )
    chosen = {name: draw(inside(name), label=name) for name in names}
    chosen["rounds"] = chosen.get("rounds", 1) or 1  # none at all goes with inboxes alone
    if draw(st.booleans()):
        chosen |= {
            "dataset": "inbox",
            "class-names": ",".join(f"c{i}" for i in range(min(classes, 50) + 1)),
            "image-size": 8,
            "dp-seeded": False,
        }
        fitting = (*fitting[:5], fitting[5] + 2)
    return dict(zip(together, fitting, strict=True)) | chosen


@pytest.mark.slow
@given(configurations())
def test_any_accepted_configuration_comes_back_equal_and_with_equal_hash(values: dict[str, Any]) -> None:
    config = Config.parse(values)
    again = Config.parse(config.flat())
    assert again == config
    assert hash(again) == hash(config)
    assert {name: config.flat()[name] for name in values} == values


def test_configurations_serve_as_keys() -> None:
    assert len({Config(), Config.parse({"seed": 0}), Config.parse({"seed": 1})}) == 2


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("learning_rate", "learning-rate"),
        ("epoch", "epochs"),
        ("sample-per-class", "samples-per-class"),
        ("patiance", "patience"),
        ("Overlap", "overlap"),
    ],
)
def test_an_unknown_key_is_refused_with_the_key_that_was_meant(wrong: str, meant: str) -> None:
    text = refusal({wrong: 3})
    assert f"unknown key {wrong} = 3" in text
    assert f"did you mean {meant}?" in text


def test_an_unknown_key_like_no_other_is_refused_with_where_to_look() -> None:
    text = refusal({"zzz": 1})
    assert "zzz" in text
    assert "docs/configuration.md" in text


WRONG_TYPES: dict[type, tuple[str, list[Any]]] = {
    bool: ("true or false", [0, 1, 1.0, "true", None, [True]]),
    int: ("a whole number", [True, 1.0, "1", None, [1], math.nan]),
    float: ("a number", [True, "0.1", "1e-3", None, [0.1]]),
    str: ("a string", [0, 1.5, False, None, ["cpu"]]),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_value_of_the_wrong_type_is_refused_with_key_value_and_type(name: str) -> None:
    words, wrongs = WRONG_TYPES[type(KEYS[name][0])]
    for wrong in wrongs:
        assert refusal({name: wrong}) == f"{name} = {wrong!r}: must be {words}"


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in FLOATS if any(map(KEYS[name][1].allows, (1.0, -1.0)))])
def test_a_whole_number_is_taken_for_a_number(name: str) -> None:
    whole = -1 if KEYS[name][1].high == 0 else 1
    value = Config.parse({name: whole}).flat()[name]
    assert value == whole
    assert type(value) is float


@given(st.data())
def test_every_number_is_taken_inside_its_range_and_refused_outside_by_name(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NUMBERS))
    good = data.draw(inside(name), label="inside")
    assert Config.parse(with_company(name, good)).flat()[name] == good
    bad = data.draw(outside(name), label="outside")
    text = refusal({name: bad})
    assert text.startswith(f"{name} = {bad!r}: must be ")
    key = KEYS[name][1]
    assert all(f"{end:g}" in text for end in (key.low, key.above, key.high) if end is not None)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_ends_of_a_range_belong_to_it_or_not_as_said(name: str) -> None:
    default, key = KEYS[name]
    kind = type(default)
    for end in (key.low, key.high):
        if end is not None:
            assert Config.parse(with_company(name, kind(end))).flat()[name] == end
    if key.above is not None:
        assert f"> {key.above:g}" in refusal({name: kind(key.above)})
        value = Config.parse({name: math.nextafter(key.above, math.inf)}).flat()[name]
        assert isinstance(value, int | float)
        assert value > key.above


@pytest.mark.matrix
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_what_is_not_finite_is_refused_and_the_message_says_so(name: str, value: float) -> None:
    text = refusal({name: value})
    assert text.startswith(f"{name} = {value!r}: must be ")
    assert "finite" in text


@pytest.mark.matrix
@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["far above", "far below"])
@pytest.mark.parametrize("name", FLOATS)
def test_a_whole_number_too_large_for_a_float_is_refused_like_infinity(name: str, value: int) -> None:
    assert "finite" in refusal({name: value})


def test_a_whole_number_below_any_float_is_refused_like_any_other() -> None:
    assert refusal({"rounds": -(10**400)}).endswith("must be >= 0 and <= 100000")


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_takes_its_names_and_no_other(name: str) -> None:
    choices = KEYS[name][1].choices
    words = KEYS[name][1].range_text().replace("`", "")
    for choice in choices:
        assert Config.parse({name: choice}).flat()[name] == choice
    text = refusal({name: choices[0].upper()})
    hint = f"; did you mean {choices[0]}?"
    assert text == f"{name} = {choices[0].upper()!r}: must be one of {words}{hint}"
    assert refusal({name: "?"}) == f"{name} = '?': must be one of {words}"


def test_overlap_lies_between_0_and_the_window() -> None:
    for window in (1, 2, 5):
        for overlap in range(window + 1):
            assert Config.parse({"window": window, "overlap": overlap}).stream.overlap == overlap
        text = refusal({"window": window, "overlap": window + 1})
        assert f"overlap = {window + 1}" in text
        assert f"window = {window}" in text


def test_overlap_is_held_against_the_default_window_too() -> None:
    assert "window = 2" in refusal({"overlap": 3})


def test_a_buffer_has_a_place_for_each_class() -> None:
    assert Config.parse({"capacity": 60, "num-classes": 60}).buffer.capacity == 60
    text = refusal({"capacity": 59, "num-classes": 60})
    assert "capacity = 59" in text
    assert "60" in text


def test_a_window_holds_no_more_classes_than_there_are() -> None:
    assert Config.parse({"window": 5, "num-classes": 5}).stream.window == 5
    text = refusal({"window": 6, "num-classes": 5})
    assert "window = 6" in text
    assert "num-classes = 5" in text


def test_the_first_class_goes_with_a_number_of_classes() -> None:
    assert Config.parse({"first-class": 60, "num-classes": 20, "capacity": 20}).data.first_class == 60
    text = refusal({"first-class": 60})
    assert "first-class = 60" in text
    assert "num-classes = 0" in text


def test_a_chunk_has_two_samples_at_least() -> None:
    assert Config.parse({"window": 2, "samples-per-class": 1}).stream.samples_per_class == 1
    assert Config.parse({"window": 1, "overlap": 0, "samples-per-class": 2}).stream.window == 1
    text = refusal({"window": 1, "overlap": 0, "samples-per-class": 1})
    assert "samples-per-class = 1" in text
    assert "window = 1" in text
    assert "at least 2" in text


# Files that must agree with the code


def test_the_documentation_is_what_the_code_generates() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == config_docs.markdown()


def test_the_page_of_metrics_and_the_table_of_bytes_are_what_the_code_generates() -> None:
    docs = ROOT / "docs"
    assert (docs / "metrics.md").read_text(encoding="utf-8") == config_docs.metrics_page()
    page = (docs / "methods.md").read_text(encoding="utf-8")
    assert config_docs.with_bytes(page) == page
    for name in METHODS:
        assert f"`{name}`" in page, name


def test_the_documentation_has_one_row_per_key_with_its_default_and_meaning() -> None:
    rows = {row[1]: row for row in re.findall(r"^(\| `([\w-]+)` \| .*)$", config_docs.markdown(), re.MULTILINE)}
    assert set(rows) == set(KEYS)
    for name, (row, _) in rows.items():
        default, key = KEYS[name]
        assert key.meaning in row
        assert f"`{str(default).lower()}`" in row or f'`"{default}"`' in row


def test_the_app_config_that_flower_reads_holds_the_defaults() -> None:
    flower = PYPROJECT["tool"]["flwr"]["app"]["config"]
    flat = Config().flat()
    assert flower == flat
    assert {name: type(value) for name, value in flower.items()} == {name: type(v) for name, v in flat.items()}


def test_example_run_configs_parse() -> None:
    files = sorted((ROOT / "experiments" / "studies").glob("*.toml"))
    assert files
    for file in files:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        flat = Config.parse(values).flat()
        assert values, file
        assert {name: flat[name] for name in values} == values, file


def test_example_studies_load(tmp_path: Path) -> None:
    files = sorted((ROOT / "experiments" / "studies").glob("*.yaml"))
    assert files
    for file in files:
        assert load_study(file, {}, tmp_path).runs, file


def test_the_quickstart_is_the_defaults(tmp_path: Path) -> None:
    study = load_study(ROOT / "experiments" / "studies" / "quickstart.yaml", {}, tmp_path)
    config, *others = study.runs.values()
    assert [other.method for other in others] == ["fedframe"]
    flat, defaults = config.flat(), Config().flat()
    assert {name for name in flat if flat[name] != defaults[name]} <= {"results-dir", "run-name", "data-dir"}


def test_federations_are_left_to_the_users_flower_settings() -> None:
    assert "federations" not in PYPROJECT["tool"]["flwr"]


@pytest.mark.parametrize(
    ("chosen", "on_device", "kept"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"keep-models": "never"}, True, False),
        ({"keep-models": "always"}, False, True),
    ],
)
def test_devices_keep_their_models_unless_told_otherwise(chosen: dict[str, str], on_device: bool, kept: bool) -> None:
    assert Config.parse(chosen).keeps_models(on_device=on_device) is kept


def test_a_word_takes_numbers_and_those_that_are_the_defaults_are_left_out() -> None:
    config = Config.parse({"stream": "dirichlet:0.50:0.1", "below-quorum": "skip:5", "aggregation": "multi-krum:2"})
    assert (config.stream.stream, config.run.below_quorum) == ("dirichlet:0.5", "skip")
    assert config.stream.numbers == {"concentration": 0.5, "drift": 0.1} and config.aggregation.hostile == 2
    assert Config.parse({"stream": "dirichlet:1:0"}).stream.numbers == {"concentration": 1.0, "drift": 0.0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stream": "blurred:2"}, "stream = 'blurred:2': share = 2.0: must be > 0 and <= 1"),
        ({"stream": "blurred:much"}, "stream = 'blurred:much': share: must be a number"),
        ({"stream": "windows:1"}, "stream = 'windows:1': windows takes no numbers after it"),
        ({"below-quorum": "skip:1.5"}, "below-quorum = 'skip:1.5': limit: must be a whole number"),
        ({"optimiser": "adamw:0.9"}, "optimiser = 'adamw:0.9': adamw takes no numbers after it"),
        ({"optimiser": "sgd:1"}, "optimiser = 'sgd:1': momentum = 1.0: must be >= 0 and <= 0.999"),
        ({"server-optimiser": "adam:0"}, "server-optimiser = 'adam:0': rate = 0.0: must be > 0"),
        ({"attack": "noise:nan"}, "attack = 'noise:nan': scale = nan: must be finite and > 0"),
        ({"precision": "bf16:1"}, "precision = 'bf16:1': must be one of fp32, tf32, bf16, auto"),
    ],
)
def test_a_wrong_number_after_a_word_is_refused_with_its_name(values: dict[str, Any], words: str) -> None:
    assert refusal(values).startswith(words)


# Keys of version 1.0


def test_there_are_at_most_106_keys() -> None:
    assert len(KEYS) <= 106


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("inference", "predict-with"),
        ("stream-blur", "stream"),
        ("hub-name", "dataset"),
        ("clip-bound", "defence"),
        ("refed-steps", "the value is always 5"),
        ("cache-dir", "FEDKACE_CACHE_DIR"),
    ],
)
def test_who_types_a_former_key_is_told_what_it_is_now(name: str, words: str) -> None:
    assert words in refusal({name: 5})
    with pytest.raises(ConfigError, match=words):
        check_value(name, 5)


OFF = {"clip-bound": 0.0, "direction-bound": -1.0, "statistics-bound": -1.0, "retention-bound": 0.0, "norm-bound": 0.0}


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ({"refed-steps": 5, "fedcbdr-balanced": True, "clients-together": 1, "inbox-bound": 0}, {}),
        ({"inference": "mean", "views": "one", "step": "captured"}, {"predict-with": "mean", "cuda-graphs": "on"}),
        ({"stream": "windows", "stream-blur": 0.1, "stream-concentration": 0.5}, {}),
        (
            {"stream": "dirichlet", "stream-concentration": 1.0, "stream-drift": 0.3, "stream-blur": 0.1},
            {"stream": "dirichlet:1:0.3"},
        ),
        (
            {"aggregation": "mean", "aggregation-rule": "multi-krum", "byzantine-clients": 2},
            {"aggregation": "multi-krum:2"},
        ),
        ({"aggregation": "none", "method": "lkc"}, {"method": "lkc"}),
        ({"attack": "none", "attack-scale": 9.0}, {}),
        ({"attack": "noise", "attack-scale": 9.0}, {"attack": "noise:9"}),
        ({"below-quorum": "skip", "below-quorum-limit": 7}, {"below-quorum": "skip:7"}),
        ({"replay-weight": "balanced", "replay-gradient": "full"}, {"replay-weight": "balanced-full"}),
        ({"gradient-norm": "mean", "gradient-bias": True}, {"gradient-norm": "mean-with-bias"}),
        ({"selection": "hbms", "landmarks": 25}, {"selection": "hbms:25"}),
        ({"precision": "fp32", "tf32": True}, {"precision": "tf32"}),
        ({"centralized-every": 5, "centralized-first": 6}, {"centralized-rounds": "every:5:6"}),
        ({"dataset": "emnist", "emnist-split": "letters"}, {"dataset": "emnist-letters"}),
        (
            {"dataset": "hub", "hub-name": "o/n@v1", "hub-label": "a b", "hub-test": ""},
            {"dataset": "hub:o/n@v1?label=a+b"},
        ),
        (
            {"dataset": "digits", "data-source": "inbox", "class-names": "a,b", "image-size": 8},
            {"dataset": "inbox", "class-names": "a,b", "image-size": 8},
        ),
        ({"dataset": "digits", "data-source": "stream", "emnist-split": "balanced", "hub-name": ""}, {}),
        (OFF, {}),
        ({**OFF, "clip-bound": 3.0}, {"defence": "on"}),
        ({**OFF, "clip-bound": 3.0, "defence": "off"}, {}),
        ({"norm-bound": 10.0}, {}),
        ({"norm-bound": 10.0, "secagg": True}, {"secagg": True}),
        ({"clip-bound": 3.0, "dp": "central"}, {"dp": "central"}),
    ],
)
def test_a_record_of_version_1_keeps_its_meaning(recorded: dict[str, Any], now: dict[str, Any]) -> None:
    assert Config.parse(renewed(recorded)) == Config.parse(now)
    assert Config().flat() | renewed(recorded) == Config.parse(now).flat()
    assert renewed(renewed(recorded)) == renewed(recorded)


def test_a_record_with_another_value_of_a_constant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"refed-steps = 6; .* always 5"):
        renewed({"refed-steps": 6})


def test_each_app_parses_the_configuration_once(small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config, parse, parsed = small(method="as3", clients=2, rounds=1), Config.parse, list[str]()

    def noted(values: dict[str, object]) -> Config:
        parsed.append(str(values["method"]))
        return parse(values)

    monkeypatch.setattr(Config, "parse", noted)
    client_app._parsed.cache_clear()
    run_inline(config)  # the server's app is given what it would have parsed
    assert parsed == ["as3"]


@pytest.mark.parametrize(
    ("away", "words"),
    [
        ("3", "'3' is not client:first-last"),
        ("1:5-4", "'1:5-4' is not"),
        ("1:0-4", "'1:0-4' is not"),
        ("1:2-3, x", "'x' is not"),
        ("10:1-2", "client 10: the run has clients 0 to 9"),
    ],
)
def test_an_absence_that_is_none_is_named(away: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^away = {away!r}: .*{words}"):
        Config.parse({"away": away})


def test_absences_are_read_as_written() -> None:
    stream = Config.parse({"clients": 4, "away": "3:1-2, 1:2-, 3:4-4"}).stream
    assert [stream.members(number) for number in range(1, 6)] == [(0, 1, 2), (0, 2), (0, 2, 3), (0, 2), (0, 2, 3)]


def test_rounds_without_end_are_for_inboxes() -> None:
    with pytest.raises(ConfigError, match=r"^rounds = 0: only with dataset = 'inbox'"):
        Config.parse({"rounds": 0})
