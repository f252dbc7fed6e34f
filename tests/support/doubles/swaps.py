"""Someone who changes a folder at the one moment that matters, while another program works in it."""

import builtins
import io
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Opened:
    """Watches files being opened, in whatever way, and acts right before the first one of a name."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str = "", action: Callable[[], object] = lambda: None) -> None:
        self.acted = False
        self.times: Counter[str] = Counter()  # by descriptor, and so in a folder that is held open
        self.by_path: Counter[str] = Counter()
        for place, function in ((os, "open"), (io, "open"), (builtins, "open")):
            real = getattr(place, function)

            def watched(path: Any, *args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
                if not isinstance(path, int):
                    own = Path(os.fsdecode(path)).name
                    (self.times if kwargs.get("dir_fd") is not None else self.by_path)[own] += 1
                    if own == name and not self.acted:
                        self.acted = True
                        action()
                return real(path, *args, **kwargs)

            patch.setattr(place, function, watched)


def after_listing(patch: pytest.MonkeyPatch, name: str, action: Callable[[], object]) -> list[str]:
    """Act once, when a folder of this name has been listed; return the list that then has an entry."""
    acted: list[str] = []
    for function in ("listdir", "scandir"):
        real = getattr(os, function)

        def listing(path: Any = ".", real: Callable[..., Any] = real) -> Any:
            found = real(path)
            place = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
            if place.name == name and not acted:
                acted.append(name)
                action()
            return found

        patch.setattr(os, function, listing)
    return acted
