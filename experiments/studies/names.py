"""The names of engines, and the project's own studies by name."""

from pathlib import Path

from fedkace_flwr.errors import ConfigError, closest

ENGINES = ("flower", "inline")
"""What runs a study: Flower's simulation, or one process without Ray."""

SUFFIXES = (".yaml", ".yml")
"""The suffixes of study files."""

TABLES = ("table1", "table2", "table3", "table4")
"""The paper's tables that a study can repeat."""

_FOLDER = Path(__file__).parent
_SAME_RUNS = {"table3": "table2", "figure2": "table1", "figure3": "table2"}  # made of another study's runs


def study_names() -> list[str]:
    """The names of the project's own studies, sorted."""
    return sorted([*_SAME_RUNS, *(path.stem for path in _FOLDER.glob("*.yaml"))])


def find_study(text: str) -> Path:
    """Find a study's file.

    Parameters
    ----------
    text : str
        The name of one of the project's own studies, such as ``table1``, or the path of a YAML file. A text with a
        folder or a YAML suffix in it is a path; otherwise a study of that name takes precedence over a file.

    Raises
    ------
    ConfigError
        There is neither a study nor a file of this name.
    """
    path = Path(text)
    if path.name != text or path.suffix in SUFFIXES:
        return path
    names = study_names()
    if text in names:
        return _FOLDER / f"{_SAME_RUNS.get(text, text)}.yaml"
    if path.is_file():
        return path
    raise ConfigError(f"{text}: unknown study; name a YAML file, or one of {', '.join(names)}{closest(text, names)}")


def looks_like_a_study(text: str) -> bool:
    """Return whether a word on the command line names one of the project's studies or a YAML file."""
    return text in study_names() or Path(text).suffix in SUFFIXES
