"""Matrix products of a CPU through oneDNN, where torch's own library leaves half of the processor unused.

torch multiplies float32 matrices on a CPU with MKL, which takes its AVX-512 kernels on processors of its own maker only.
The oneDNN that torch carries too takes them wherever they are. Maths: the same product, of full float32 operands with
float32 sums; only the order of the sums is another, as between any two libraries.

While a ``Products`` lives, this process's products of two float32 matrices on the CPU (forward, backward, with a bias
or added to a matrix) go there, whoever asks for them. Small ones, other dtypes and other devices go on as before. The
operation takes rows of both operands one after another in memory; an operand that lies across is copied some
``COPIED`` elements at a time.

Shape suffixes: M rows, K inner, N columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

LEAST: Final = 1 << 21
"""Multiplications from which oneDNN's longer way to its kernel is paid back: 128 x 128 x 128 takes 30 us there and 40 us
in MKL, 64 x 64 x 64 15 us and 6 us (one core of an AMD EPYC with AVX-512, torch 2.13)."""
NARROW: Final = 16
"""Below so many rows, columns or inner elements a product is one of vectors, which memory paces in either library."""
COPIED: Final = 1 << 19
"""Elements of an operand that are copied at once: 2 MiB, so that what a step holds does not grow with its matrices."""

INNER: Final = 256
"""Inner elements that are summed without a stop where operands are copied anyway. oneDNN adds up to some 512 products
one after another, MKL 128: errors of 1,024 products are 4.1e-7 and 2.5e-7 of the result, in sums of 256 2.9e-7."""


def product_library(asked: str = "machine", device_type: str = "cpu") -> str:
    """Return who multiplies float32 matrices on this machine's CPU: "onednn", or "torch" for torch's own choice.

    ``asked`` "torch" is never changed; "machine" is oneDNN where torch has both it and MKL, and the processor has AVX-512
    and another maker than MKL. The answer depends on nothing but the machine, so that ranks on like machines agree.
    """
    if asked == "torch" or device_type != "cpu":
        return "torch"
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (
        "onednn" if both and wide and _maker() in ("AuthenticAMD", "HygonGenuine") and _kernel() else "torch"
    )


def _maker() -> str:
    """Return the processor's maker as it names itself, "" where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("vendor_id")), "")
    except OSError:
        return ""


def _kernel() -> Callable[..., Tensor] | None:
    """Return oneDNN's x [M, K] w [N, K]^T + b [N], which torch's compiler uses, or None in a torch without it."""
    found: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if found is None else found.default


class Products:
    """oneDNN as this process's kernel of matrix products, from now until ``close`` or until nobody holds this."""

    def __init__(self) -> None:
        kernel = _kernel()
        assert kernel is not None
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch says, once, that a kernel was replaced
            warnings.filterwarnings("ignore", message=".*[Oo]verrid")
            for name, function in _kernels(kernel).items():
                self._library.impl(name, function, "CPU", allow_override=True)

    def close(self) -> None:
        """Give torch's own kernels back."""
        self._library._destroy()


def use_products(asked: str = "machine", device_type: str = "cpu") -> Products | None:
    """Return ``Products`` where ``product_library`` says "onednn", else None."""
    return Products() if product_library(asked, device_type) == "onednn" else None


def _kernels(kernel: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Return the kernels by the name of the operation; torch's own are reached by the forms that write into a tensor."""

    def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
        if _pays(a_MK, b_KN):
            return product(kernel, a_MK, b_KN)
        return torch.mm(a_MK, b_KN, out=a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]))

    def addmm(added: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if beta == 1 and alpha == 1 and _pays(a_MK, b_KN, added):
            return product(kernel, a_MK, b_KN).add_(added)
        out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
        return torch.addmm(added, a_MK, b_KN, beta=beta, alpha=alpha, out=out)

    def addmm_(held: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if beta == 1 and alpha == 1 and _pays(a_MK, b_KN, held):
            return held.add_(product(kernel, a_MK, b_KN))
        return torch.addmm(held, a_MK, b_KN, beta=beta, alpha=alpha, out=held)

    return {"mm": mm, "addmm": addmm, "addmm_": addmm_}


def _pays(a_MK: Tensor, b_KN: Tensor, added: Tensor | None = None) -> bool:
    """Return whether oneDNN takes the product and is the faster one; shapes that do not fit are left to torch to name."""
    if a_MK.dtype is not torch.float32 or b_KN.dtype is not torch.float32:
        return False
    if added is not None and added.dtype is not torch.float32:
        return False
    m, k = a_MK.shape
    inner, n = b_KN.shape
    return m * k * n >= LEAST and min(m, k, n) >= NARROW and inner == k


def product(kernel: Callable[..., Tensor], a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a b [M, N] by ``kernel``; operands that lie across in memory are copied ``COPIED`` elements at a time.

    Where both do - a weight's gradient, whose inner elements are all tokens - the sums are of ``INNER`` tokens each.
    """
    m, k = a_MK.shape
    n = b_KN.shape[1]
    b_NK = b_KN.t()
    across = not a_MK.is_contiguous(), not b_NK.is_contiguous()
    if not any(across):
        return kernel(a_MK, b_NK, None, "none", [], "")
    depth = min(k, INNER) if all(across) else k
    rows, columns = (
        max(NARROW, COPIED // depth) if copied else whole
        for copied, whole in zip(across, (m, n), strict=True)
    )
    if rows >= m and columns >= n:
        return _summed(kernel, a_MK, b_NK, depth)
    out_MN = a_MK.new_empty(m, n)
    for c in range(0, n, columns):
        for r in range(0, m, rows):
            part = _summed(kernel, a_MK[r : r + rows], b_NK[c : c + columns], depth)
            out_MN[r : r + rows, c : c + columns] = part
    return out_MN


def _summed(kernel: Callable[..., Tensor], a_MK: Tensor, b_NK: Tensor, depth: int) -> Tensor:
    """Return a b^T [M, N], added up from pieces of ``depth`` inner elements.

    The kernel is given dense rows only: on a strided weight oneDNN falls back to a loop that is a hundred times slower.
    """
    out: Tensor | None = None
    for d in range(0, a_MK.shape[1], depth):
        a, b = a_MK[:, d : d + depth].contiguous(), b_NK[:, d : d + depth].contiguous()
        part = kernel(a, b, None, "none", [], "")
        out = part if out is None else out.add_(part)
    assert out is not None
    return out
