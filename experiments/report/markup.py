"""Tables of text in GitHub's Markdown and in LaTeX."""

from collections.abc import Sequence

from experiments.report.escaping import in_markdown, in_tex
from fedkace_flwr.storage.names import printable


def markdown_table(title: str, head: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown, with its title above and its notes below; the first column is on the left."""
    rows = [[in_markdown(cell) for cell in cells] for cells in [head, *body]]
    rows.insert(1, ["---", *("---:" for _ in head[1:])])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    told = [f"*{in_markdown(note)}*" for note in notes]
    return "\n\n".join([f"### {in_markdown(title)}", "\n".join(lines), *told]) + "\n"


def latex_table(title: str, head: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return a table in LaTeX, with its notes as comments; needs no package."""
    columns = "l" + "r" * (len(head) - 1)
    lines = [" & ".join(in_tex(cell) for cell in cells) + r" \\" for cells in [head, *body]]
    lines.insert(1, r"\hline")
    rows = "\n".join(lines)
    told = "".join(f"% {printable(note)}\n" for note in notes)
    return (
        f"{told}\\begin{{table}}\n\\centering\n\\caption{{{in_tex(title)}}}\n\\begin{{tabular}}{{{columns}}}\n"
        f"\\hline\n{rows}\n\\hline\n\\end{{tabular}}\n\\end{{table}}\n"
    )
