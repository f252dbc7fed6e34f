"""Processes that are killed at their n-th call to the file system."""

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a process of its own that is killed at its n-th call to the file system.

    Returns whether it came to be killed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside PyTorch's idle threads: nothing is computed
        child = os.fork()
    if child == 0:
        calls = 0

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        status = 1
        try:
            for name in ("open", "write", "fsync", "replace", "unlink"):
                setattr(os, name, dying(getattr(os, name)))
            action()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
