"""What the command line says before it has a command: an overview, and a cure for a word that is none."""

from collections.abc import Collection, Sequence

from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiments.studies.names import looks_like_a_study, study_names

_COMMANDS = (
    ("run quickstart", "ten clients learn handwritten digits; one to two minutes"),
    ("run STUDY --dry-run", "what a study would run, and for how long"),
    ("report results/STUDY", "tables, figures and a page with charts"),
    ("export results/STUDY/RUN FOLDER", "a run's model, with a card"),
    ("predict --state FOLDER IMAGE...", "the answers of a client's model"),
)
_OPTIONS_WITH_ONE_VALUE = ("--engine", "--workers", "--gpu-fraction", "--scale", "--results", "--output")


def overview(program: str) -> str:
    """Return the commands that most people need, for ``program`` without arguments."""
    width = max(len(command) for command, _ in _COMMANDS)
    lines = [f"  {program} {command:{width}}  {meaning}" for command, meaning in _COMMANDS]
    return "\n".join(
        [
            "Run studies of streaming federated continual learning, and look at their results.",
            "",
            *lines,
            "",
            f"Studies: {', '.join(study_names())}; or a YAML file of your own.",
            "Further commands: table, keep, stream, feed, serve, app, robustness, bench. "
            "COMMAND --help explains a command, docs/running.md all of them.",
        ]
    )


def check_command(arguments: Sequence[str], commands: Collection[str]) -> None:
    """Reject a first word that is no command.

    Raises
    ------
    ConfigError
        It names a study, or is unknown.
    """
    word = arguments[0]
    if word.startswith("-") or word in commands:
        return
    if looks_like_a_study(word):
        raise ConfigError(f"{word}: is a study, not a command; did you mean run {word}?")
    raise ConfigError(f"{word}: must be one of {', '.join(commands)}{closest(word, commands)}")


def study_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``run`` or ``stream`` with the study before the options: some take any number of values."""
    words = list(arguments)
    if words[:1] not in (["run"], ["stream"]) or len(words) < 2 or not words[1].startswith("-"):
        return words
    for index in range(len(words) - 1, 1, -1):
        if looks_like_a_study(words[index]) and words[index - 1] not in _OPTIONS_WITH_ONE_VALUE:
            return [words[0], words[index], *words[1:index], *words[index + 1 :]]
    return words
