"""Write what follows from the declarations of keys: ``docs/configuration.md`` and the app's defaults in ``pyproject.toml``.

Run as ``python -m fedkace_flwr.config_docs`` (``make docs``).
"""

import json
import re
from pathlib import Path

from fedkace_flwr import registry as registry  # declares the methods' keys
from fedkace_flwr.config import Config, all_keys
from fedkace_flwr.keys import Scalar

_ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"(?<=\[tool\.flwr\.app\.config\]\n).*?(?=\n\[|\n#|\Z)", re.DOTALL)


def markdown() -> str:
    """Return ``docs/configuration.md`` as it should be."""
    defaults = Config().flat()
    lines = [
        "# Configuration",
        "",
        "Generated from the declarations of the keys by `make docs`; a test compares the two.",
        "",
        "Set a key with `flwr run . --run-config 'overlap=0 seed=1'`, with a file of such keys "
        "(`--run-config experiments/studies/cifar100.toml`), or in a study (`--set overlap=0`). "
        "Keys marked *Reading* choose between readings of the paper; [method.md](method.md) explains them. Keys marked "
        "*Inferred* stand for what a rival's publication leaves open.",
        "",
        "*Affects* says what a key changes: `numbers` (the results), `waiting` (how long a run waits for clients), or "
        "`place` (where things are and how they are kept). A run can be resumed with other values of the latter two.",
    ]
    title = None
    for section, name, key in all_keys():
        if section is not title:
            title = section
            heading = "Method" if section is Config else str(section.__doc__).rstrip(".")
            lines += ["", f"## {heading}", "", "| key | default | unit | range | affects | meaning |"]
            lines += ["|---|---|---|---|---|---|"]
        default = f"`{_literal(defaults[name])}`"
        lines.append(f"| `{name}` | {default} | {key.unit} | {key.range_text()} | {key.affects} | {key.meaning} |")
    return "\n".join(lines) + "\n"


def with_defaults(pyproject: str) -> str:
    """Return the text of ``pyproject.toml`` with the present defaults as Flower's app configuration."""
    table = "".join(f"{name} = {_literal(value)}\n" for name, value in Config().flat().items())
    return _TABLE.sub(lambda _: table, pyproject, count=1)


def _literal(value: Scalar) -> str:
    """A value as TOML has it."""
    return str(value) if isinstance(value, float) else json.dumps(value)


def main() -> None:
    """Rewrite both files."""
    for path, text in (
        (_ROOT / "docs" / "configuration.md", markdown()),
        (_ROOT / "pyproject.toml", with_defaults((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))),
    ):
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
