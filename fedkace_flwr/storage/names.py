"""Names and texts from outside: parts of a path that lead nowhere else, and lines that show what they say."""

import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path, PurePath

from fedkace_flwr.errors import nearest

_TOKEN = re.compile(r"[0-9A-Za-z]{1,64}")
_MARKDOWN = re.compile(
    r"[\\`*\[\]<>|&~$]"
    r"|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])"  # between letters it is one
    r"|:(?=//)|(?<=www)\.",  # what would become a link
    re.IGNORECASE,
)
_START = r"(?:file:|(?<![\w.~</-]))(?:~\w*)?/"  # of an absolute path
_PATH = re.compile(
    r"\b(?P<address>(?!file:)[A-Za-z][A-Za-z0-9+.-]{,15}://\S*)"  # which stays as it is
    + "".join(rf"|(?<={quote}){_START}[^{quote}\n]*(?={quote})" for quote in "'\"`")
    # Without quotes it ends with a blank, unless the blank is within the name of a folder.
    + rf"|{_START}(?:[^\s/\"`()<>:;,](?:[^\n/\"`()<>:;,]*[^\s/\"`()<>:;,])?/+|/)*[^\s/\"`()<>:;,]*"
)
_LONGEST_SUFFIX = 16


def token(text: str) -> str:
    """A part of a path that stands for a text of any kind: the text where it is short and plain, else its hash."""
    return text if _TOKEN.fullmatch(text) else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def printable(text: str) -> str:
    """The text on one line, with everything escaped that a terminal or a log would not show as it stands."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def in_markdown(text: str) -> str:
    """The text on one line of GitHub's Markdown, in a table or outside, as text and nothing else."""
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", printable(text))


def without_paths(text: str) -> str:
    """The text with each absolute path in it cut to its last name, which tells nothing of the folders of a machine."""
    return _PATH.sub(lambda found: found["address"] or PurePath(found[0]).name or "/", text)


def closest_path(path: Path, suffixes: Collection[str] = ()) -> str:
    """Return ``; did you mean PATH?`` with the file or folder beside a missing one whose name is nearest.

    Parameters
    ----------
    path : Path
        The path that does not exist.
    suffixes : collection of str
        The suffixes of the files to choose from; if empty, folders are.

    Returns
    -------
    str
        Nothing if the path exists, or no name beside it is near.
    """
    try:
        if path.exists():
            return ""
        beside = path.absolute().parent.iterdir()
        name = nearest(path.name, (each.name for each in beside if _has(each, suffixes)))
    except (OSError, ValueError):
        return ""
    return f"; did you mean {printable(str(path.with_name(name)))}?" if name else ""


def _has(path: Path, suffixes: Collection[str]) -> bool:
    return path.suffix in suffixes if suffixes else path.is_dir()


def fitted(name: str, most: int) -> str:
    """A file's name, shortened to a number of bytes where it has more; names that differ stay different.

    Parameters
    ----------
    name : str
        The name, with its suffix.
    most : int
        At least 40.
    """
    if len(os.fsencode(name)) <= most:
        return name
    suffix = PurePath(name).suffix
    if len(os.fsencode(suffix)) > _LONGEST_SUFFIX:
        suffix = ""
    tail = f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}{suffix}"
    # A character that the cut divides is left out.
    head = os.fsencode(name)[: most - len(os.fsencode(tail))].decode(errors="ignore")
    return head + tail
