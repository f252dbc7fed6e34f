"""What makes a site of the documentation: further pages, links, and formulas.

The documents are written for readers of the repository, who follow links from file to file. On the site, documents
outside ``docs/`` become pages too, links to what is no page lose their target and keep their text, and formulas become
MathML, which browsers show without a script. No page loads anything from the network.
"""

import argparse
import html
import json
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fedkace_flwr.experiments.arguments import commands_of, make_parser
from fedkace_flwr.inference.predict import prediction_parser, service_parser

ROOT = Path(__file__).parents[2]

_SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme would load where a page is opened from disk
_SEARCH = "site/search-from-disk.js"  # what it loads instead

OUTSIDE = {
    "README.md": "index.md",
    "REPRODUCIBILITY.md": "reproducibility.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Documents outside ``docs/``, and their pages."""

PUBLIC = {
    "Runs": ["fedkace_flwr.experiments.api"],
    "Models": ["fedkace_flwr.export.loading"],
    "Clients' half of a method": ["fedkace_flwr.clients.base"],
    "Server's half of a method": [
        "fedkace_flwr.strategies.base.ServerRule",
        "fedkace_flwr.rounds.server_round.ServerRound",
    ],
    "Keys and metrics": ["fedkace_flwr.keys.key", "fedkace_flwr.messaging.metrics.Metric"],
    "Networks": ["fedkace_flwr.networks.network"],
    "Data sets and streams": ["fedkace_flwr.data.readers.source", "fedkace_flwr.data.partitioner"],
    "Losses": ["fedkace_flwr.training.losses"],
    "Results": ["fedkace_flwr.experiments.results.loading", "fedkace_flwr.results.transfer"],
    "Errors": ["fedkace_flwr.errors"],
}
"""The public interface: what the page on Python describes, by heading."""

_LINK = re.compile(
    r"^```.*?^```|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)
"""A link, or code, in which nothing is a link."""

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/``."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_notebook(path)))
    files.append(File.generated(config, "commands.md", content=_commands()))
    files.append(File.generated(config, "interface.md", content=_interface()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages of the site; where there is none, keep their text alone."""
    outside = {there: here for here, there in OUTSIDE.items()}
    source = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(found: re.Match[str]) -> str:
        target, _, anchor = (found["target"] or "").partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        there = there.removesuffix(".ipynb") + ".md" if there.endswith(".ipynb") else there
        if there and files.get_file_from_path(there) is not None:
            there = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
            return f"{found['image']}[{found['text']}]({there}{'#' if anchor else ''}{anchor})"
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: links to {found['target']}, which does not exist")
        return found["text"]

    return _LINK.sub(linked, markdown)


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write formulas as MathML, and names in docstrings without the roles of Sphinx."""

    def written(found: re.Match[str]) -> str:
        formula = html.unescape(found[2]).strip()[2:-2]  # without the delimiters
        try:
            return convert(formula, display="block" if found[1] == "div" else "inline")
        except Exception as fault:
            raise PluginError(f"{page.file.src_uri}: the formula {formula!r} cannot be written ({fault})") from fault

    return _ROLE.sub("", _FORMULA.sub(written, content))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Let the search work from disk without a script from the network."""
    script = posixpath.relpath(_SEARCH, posixpath.dirname(page.url) or ".")
    return _without_shim(output, page.file.src_uri, script)


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for the page that a server shows where there is none."""
    return _without_shim(output_content, template_name, _SEARCH) if template_name == "404.html" else output_content


def _without_shim(text: str, name: str, script: str) -> str:
    if _SHIM not in text:
        raise PluginError(f"{name}: the theme no longer loads {_SHIM}; see docs/{_SEARCH}")
    return text.replace(_SHIM, script)


def _notebook(path: Path) -> str:
    """A notebook as a page: its texts, its code and what that showed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += [_shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def _shown(output: Mapping[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f'<img alt="plot" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        return f'<div class="shown">{re.sub(r"<style.*?</style>|<!--.*?-->", "", "".join(data["text/html"]), flags=re.DOTALL)}</div>'
    return f"```text\n{''.join(data['text/plain'])}\n```"


def _commands() -> str:
    """The page of the command line, from its parser."""
    lines = [
        "# Commands",
        "",
        "`fedkace COMMAND` and `python -m experiments COMMAND` are the same. In a checkout, `make help` lists what "
        "`make` can do.",
    ]
    elsewhere = {
        "predict": prediction_parser("fedkace predict", "fedkace serve"),
        "serve": service_parser("fedkace serve"),
    }
    for name, parser in {**commands_of(make_parser("fedkace")), **elsewhere}.items():
        lines += ["", f"## {name}", "", f"```text\n{_help(parser)}```"]
    return "\n".join(lines) + "\n"


def _help(parser: argparse.ArgumentParser) -> str:
    class Wide(argparse.HelpFormatter):
        def __init__(self, prog: str, **more: Any) -> None:
            super().__init__(prog, max_help_position=24, width=86)

    parser.formatter_class = Wide
    return parser.format_help()


def _interface() -> str:
    """The page of the public interface, for mkdocstrings."""
    lines = [
        "# Public interface",
        "",
        "What other code may build upon. [add-a-method.md](add-a-method.md) and [extend.md](extend.md) show how; the "
        "rest of the packages may change without notice.",
    ]
    for heading, names in PUBLIC.items():
        lines += ["", f"## {heading}", *(f"\n::: {name}" for name in names)]
    return "\n".join(lines) + "\n"
