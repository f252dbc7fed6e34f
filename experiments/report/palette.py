"""The colours of a study's lines, the same in every picture and on the page."""

from collections.abc import Mapping

from fedkace_flwr.experiments.report.names import method_rank, role

LIGHT = (
    *("#c2410c", "#0b63a5", "#00755a", "#a83c78", "#806000"),
    *("#5a4fc0", "#0e7f8a", "#9c4a2a", "#5c6470", "#3d7a1f"),
)
"""Colours on a light background; the first belongs to FedKACE where it takes part."""

DARK = (
    *("#ff8f5c", "#6db3f2", "#43cfa0", "#f294c6", "#e3bb4e"),
    *("#b5a9ff", "#5fd3da", "#dfa083", "#b4bcc6", "#9bd378"),
)
"""The same on a dark background."""

INK, MUTED = "#16202b", "#8a8f98"
"""Colours of the reference (Centralized) and of chance."""


def ranked(lines: Mapping[str, str]) -> list[str]:
    """Return the names of lines in the order of their colours: the method of the paper first, references last.

    Parameters
    ----------
    lines : mapping of str to str
        Each line's method by the line's name.
    """
    return sorted(lines, key=lambda name: (method_rank(lines[name]), name))


def colours(lines: Mapping[str, str]) -> dict[str, str]:
    """Return each line's colour on a light background; colours repeat from the eleventh line on.

    Parameters
    ----------
    lines : mapping of str to str
        Each line's method by the line's name.
    """
    order = ranked(lines)
    return {
        name: INK if role(lines[name]) == "reference" else LIGHT[index % len(LIGHT)] for index, name in enumerate(order)
    }
