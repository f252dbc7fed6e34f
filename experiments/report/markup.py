"""Tables and notes as GitHub's Markdown, LaTeX and HTML.

Names of runs, variants and classes come from files; here they become text that no format takes for markup.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

from fedkace_flwr.storage.names import in_markdown, printable

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


def in_html(text: str) -> str:
    """The text on one line of HTML, in no attribute, or of what Plotly takes for HTML, as text and nothing else."""
    return html.escape(printable(text), quote=False)  # Plotly would show &quot; as it is


def markdown_notes(notes: Sequence[str]) -> str:
    """Return notes as paragraphs of GitHub's Markdown."""
    return "".join(f"*{in_markdown(note)}*\n\n" for note in notes)


def latex_notes(notes: Sequence[str]) -> str:
    """Return notes as comments of LaTeX."""
    return "".join(f"% {printable(note)}\n" for note in notes)


def html_notes(notes: Sequence[str]) -> str:
    """Return notes as paragraphs of HTML."""
    return "".join(f"<p>{in_html(note)}</p>\n" for note in notes)


class Table(NamedTuple):
    """A table of text with its title (may be empty) and notes; its first ``words`` columns are aligned on the left."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: int = 1

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, with its title above and its notes below."""
        rows = [[in_markdown(cell) for cell in cells] for cells in [self.head, *self.rows]]
        rows.insert(1, ["---" if column < self.words else "---:" for column in range(len(self.head))])
        heading = f"### {in_markdown(self.title)}\n\n" if self.title else ""
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
        return f"{heading}{body}\n\n{markdown_notes(self.notes)}".rstrip("\n") + "\n"

    def latex(self) -> str:
        """Return the table in LaTeX, with its notes as comments above; needs no package."""
        columns = "l" * self.words + "r" * (len(self.head) - self.words)
        head, *rows = [" & ".join(map(in_tex, cells)) + " \\\\\n" for cells in [self.head, *self.rows]]
        return (
            f"{latex_notes(self.notes)}\\begin{{table}}\n\\centering\n\\caption{{{in_tex(self.title)}}}\n"
            f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{head}\\hline\n{''.join(rows)}"
            "\\hline\n\\end{tabular}\n\\end{table}\n"
        )

    def html(self) -> str:
        """Return the table in HTML, with its title above and its notes below."""
        lines = []
        for tag, cells in [("th", self.head), *(("td", row) for row in self.rows)]:
            kinds = [f"{tag} class=word" if column < self.words else tag for column in range(len(cells))]
            row = "".join(f"<{kind}>{in_html(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
            lines.append(f"<tr>{row}</tr>\n")
        heading = f"<h3>{in_html(self.title)}</h3>\n" if self.title else ""
        return f"{heading}<div class=wide><table>\n{''.join(lines)}</table></div>\n{html_notes(self.notes)}"
