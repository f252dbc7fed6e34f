"""Tables of text in GitHub's Markdown and in LaTeX."""

from collections.abc import Sequence

from fedkace_flwr.experiments.report.escaping import in_markdown, in_tex
from fedkace_flwr.storage.names import printable


def markdown_notes(notes: Sequence[str]) -> str:
    """Return notes as paragraphs of GitHub's Markdown."""
    return "".join(f"*{in_markdown(note)}*\n\n" for note in notes)


def markdown_table(
    title: str, head: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str], left: int = 1
) -> str:
    """Return a table in GitHub's Markdown, with its title (unless empty) above and its notes below.

    The first ``left`` columns hold words, which are aligned on the left.
    """
    rows = [[in_markdown(cell) for cell in cells] for cells in [head, *body]]
    rows.insert(1, ["---" if column < left else "---:" for column in range(len(head))])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    heading = f"### {in_markdown(title)}\n\n" if title else ""
    text = heading + "\n".join(lines) + "\n\n" + markdown_notes(notes)
    return text.rstrip("\n") + "\n"


def latex_notes(notes: Sequence[str]) -> str:
    """Return notes as comments of LaTeX."""
    return "".join(f"% {printable(note)}\n" for note in notes)


def latex_table(
    title: str, head: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str], left: int = 1
) -> str:
    """Return a table in LaTeX, with its notes as comments; needs no package. The first ``left`` columns hold words."""
    columns = "l" * left + "r" * (len(head) - left)
    lines = [" & ".join(in_tex(cell) for cell in cells) + r" \\" for cells in [head, *body]]
    lines.insert(1, r"\hline")
    rows = "\n".join(lines)
    return (
        f"{latex_notes(notes)}\\begin{{table}}\n\\centering\n\\caption{{{in_tex(title)}}}\n\\begin{{tabular}}{{{columns}}}\n"
        f"\\hline\n{rows}\n\\hline\n\\end{{tabular}}\n\\end{{table}}\n"
    )
