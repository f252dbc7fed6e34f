"""Imports without garbage collection, while a process starts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def pause_collection() -> None:
    """Switch garbage collection off until :func:`without_collection` ends."""
    gc.disable()


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules without garbage collection, and exempt from later collections what exists at the end.

    PyTorch, Flower and Ray create hundreds of thousands of objects that live as long as the process. Collections would
    visit them again and again: during the imports, during the run, and when the interpreter ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
