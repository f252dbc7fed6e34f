"""Texts in a report: names of runs, variants and classes come from files, and must not be taken for markup."""

from fedkace_flwr.storage.names import in_markdown as in_markdown
from fedkace_flwr.storage.names import printable

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


def in_tex(text: str) -> str:
    """The text on one line of LaTeX, as text and nothing else; needs no package."""
    return "".join(_TEX.get(sign, sign) for sign in printable(text))
