"""Python's garbage collector, out of the way of work that makes many objects and no cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Let the collector of cycles rest while the context is open; objects are freed by their counts all the same.

    A cold plan of 16,384 devices takes 2.7 instead of 3.0 processor seconds with it, and 1 MiB more memory.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
