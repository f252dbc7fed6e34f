"""Texts in a report: names of runs, variants and classes come from files, and must not be taken for markup."""

import re

from fedkace_flwr.storage.names import printable

_MARKDOWN = re.compile(
    r"[\\`*\[\]<>|&~$]"
    r"|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])"  # between letters it is one
    r"|:(?=//)|(?<=www)\.",  # what would become a link
    re.IGNORECASE,
)
_TEX = {
    **{sign: f"\\{sign}" for sign in "%&_#${}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    # At the start of a row these would belong to the end of the row before.
    "[": "{[}",
    "*": "{*}",
    "±": r"$\pm$",
}


def in_markdown(text: str) -> str:
    """The text on one line of GitHub's Markdown, in a table or outside, as text and nothing else."""
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", printable(text))


def in_tex(text: str) -> str:
    """The text on one line of LaTeX, as text and nothing else; needs no package."""
    return "".join(_TEX.get(sign, sign) for sign in printable(text))
