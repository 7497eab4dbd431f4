"""Importing torch, transformers and what stands on them in less time; what can be called afterwards is the same.

Four things cost a start-up time and give it nothing: the garbage collector, which searches a million new objects that
all stay; the loading of torch's largest library, which needs no interpreter and can go on beside the import of plain
Python modules; transformers' reading of the source of all its models (see ``model_index``); and scipy's optimizers,
which transformers imports for the loss of an object detector.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.mesh import env
from meshwright.mesh.model_index import remembered

BESIDE = ("sympy", "numpy")
"""What torch and its DTensor import in any case, and what needs no torch."""
MODEL_CODE = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
"""What every model of transformers needs; its own file is one of hundreds, and small."""
LATER = "scipy.optimize"
LATER_NAMES = ("linear_sum_assignment",)
"""Functions of ``LATER`` that transformers imports by name, and calls only in the loss of a detector."""


def load_modules(names: Sequence[str]) -> None:
    """Import the modules ``names``, which stand on torch, in order; the collector searches what is there no more.

    Raises:
        ImportError: one of them cannot be imported.
    """
    if all(name in sys.modules for name in names or ("torch",)):
        return
    with resting():
        torch_beside_others()
        with remembered(env.cache_folder()), deferred(LATER, LATER_NAMES):
            for name in ("torch", *names):
                importlib.import_module(name)


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Let the garbage collector rest while the context is open; what is there at its end is never searched again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def torch_beside_others() -> None:
    """Load torch's library in a thread while plain modules are imported here; nothing when torch is there already."""
    if "torch" in sys.modules:
        return
    wait = load_ahead()
    for name in BESIDE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    wait()


def load_ahead() -> Callable[[], None]:
    """Begin to load torch's CPU library in a thread; return what waits for its end.

    It is the library that ``import torch`` loads, after the one that it loads first, so the import finds it loaded.
    """
    spec = importlib.util.find_spec("torch")
    if "torch" in sys.modules or spec is None or spec.origin is None:
        return _nothing
    folder = Path(spec.origin).parent / "lib"
    thread = threading.Thread(target=_load, args=(folder,), name="torch-library", daemon=True)
    thread.start()
    return thread.join


def _nothing() -> None:
    """Wait for nothing."""


def _load(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a build with other libraries: its import will find them
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libtorch_cpu.so"))


@contextlib.contextmanager
def deferred(name: str, functions: Sequence[str]) -> Iterator[None]:
    """While the context is open, who imports ``functions`` of module ``name`` gets stand-ins that import it when called.

    Any other name of the module is the real one, and imports it.
    """
    spec = None
    if name not in sys.modules:
        with contextlib.suppress(ImportError):  # no such package
            spec = importlib.util.find_spec(name)
    if spec is None:
        yield
        return
    stand_in = _Later(name, functions, spec.submodule_search_locations)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


class _Later(ModuleType):
    """A module that is imported when something of it is needed."""

    def __init__(self, name: str, functions: Sequence[str], path: list[str] | None) -> None:
        super().__init__(name, f"Stands for {name} until something of it is needed.")
        if path is not None:
            self.__path__ = path  # so that its submodules are found
        for function in functions:
            setattr(self, function, _call_later(name, function))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(_real(self.__name__), attribute)


def _real(name: str) -> ModuleType:
    """Return the module itself, in place of a stand-in."""
    if isinstance(sys.modules.get(name), _Later):
        del sys.modules[name]
    return importlib.import_module(name)


def _call_later(module: str, function: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), function)(*args, **kwargs)

    call.__name__ = call.__qualname__ = function
    return call
