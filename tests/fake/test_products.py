"""oneDNN as the kernel of matrix products: the same products, in every form and place, and torch's own again after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshwright.parallel import products
from meshwright.parallel.products import LEAST, Products, product_library, use_products


def operands(seed: int, m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a [m, k] and b [k, n]."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=made, dtype=dtype), torch.randn(k, n, generator=made, dtype=dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Give oneDNN's kernel to this process for one test; its calls' shapes, [M, K, N], are noted."""
    real = products._kernel()
    if real is None or not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    noted: list[tuple[int, ...]] = []

    def kernel(x: Tensor, w: Tensor, *rest: object) -> Tensor:
        assert x.is_contiguous()
        assert w.is_contiguous()  # a strided weight would be right, and a hundred times slower
        noted.append((*x.shape, w.shape[0]))
        return real(x, w, *rest)

    monkeypatch.setattr(products, "_kernel", lambda: kernel)
    held = Products()
    yield noted
    held.close()


def close_to(got: Tensor, a: Tensor, b: Tensor, added: Tensor | None = None) -> None:
    """Assert that ``got`` is a b (+ added) within what float32 sums of that length may be apart."""
    exact = a.double() @ b.double() + (0.0 if added is None else added.double())
    bound = (a.double().abs() @ b.double().abs()).max() * 2.0**-24 * 32
    assert (got.double() - exact).abs().max() <= bound


def test_products_in_every_layout_of_their_operands(calls: list[tuple[int, ...]]) -> None:
    a, b = operands(0, 192, 160, 144)
    for x in (a, a.t().contiguous().t(), torch.cat([a, a], 1)[:, :160]):
        for y in (b, b.t().contiguous().t(), torch.cat([b, b], 1)[:, 144:]):
            close_to(x @ y, a, b)
    assert len(calls) == 9


def test_pieces_of_copied_operands(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "COPIED", 160 * 50)
    a, b = operands(1, 192, 160, 144)
    got = a.t().contiguous().t() @ b
    close_to(got, a, b)
    assert got.is_contiguous()
    assert max(m for m, _, _ in calls) == 50
    assert max(n for _, _, n in calls) == 50
    assert sum(m * n for m, _, n in calls) == 192 * 144


def test_weights_gradients_are_sums_of_short_sums(calls: list[tuple[int, ...]]) -> None:
    tokens = 2 * products.INNER + 44
    x, grad = torch.randn(tokens, 96), torch.randn(tokens, 80)
    got = grad.t() @ x
    assert calls == [(80, 256, 96), (80, 256, 96), (80, 44, 96)]
    exact = grad.double().t() @ x.double()

    def apart(value: Tensor) -> float:
        return (value.double() - exact).norm().item()

    own = torch.mm(grad.t(), x, out=torch.empty(80, 96))
    assert apart(got) < 1.6 * apart(own)


def test_forms_with_a_bias_and_in_place(calls: list[tuple[int, ...]]) -> None:
    a, b = operands(2, 192, 160, 144)
    bias, held = torch.randn(144), torch.randn(192, 144)
    close_to(torch.addmm(bias, a, b), a, b, bias)
    close_to(torch.nn.functional.linear(a, b.t(), bias), a, b, bias)
    kept = held.clone()
    close_to(kept.addmm_(a, b), a, b, held)
    assert len(calls) == 3


def test_gradients_of_a_linear_layer(calls: list[tuple[int, ...]]) -> None:
    layer, x = torch.nn.Linear(160, 144), torch.randn(2, 96, 160, requires_grad=True)
    out, grad = layer(x), torch.randn(2, 96, 144)
    out.backward(grad)
    flat = grad.reshape(-1, 144)
    assert x.grad is not None
    assert layer.weight.grad is not None
    close_to(x.grad.reshape(-1, 160), flat, layer.weight.detach())
    close_to(layer.weight.grad, flat.t(), x.detach().reshape(-1, 160))
    assert len(calls) == 3


def test_small_products_and_other_dtypes_keep_their_bits(calls: list[tuple[int, ...]]) -> None:
    small, wide, thin = (
        operands(3, 64, 64, 64),
        operands(4, 192, 160, 144, torch.float64),
        operands(5, 8, 4096, 256),
    )
    got = [a @ b for a, b in (small, wide, thin)]
    sums = [torch.addmm(a @ b, a, b, beta=0.5, alpha=2.0) for a, b in (small, wide)]
    assert not calls
    a, b = operands(6, 192, 160, 144)
    scaled = torch.addmm(a @ b, a, b, beta=0.5)
    in_place = (small[0] @ small[1]).addmm_(*small)
    close_to(scaled, a, b, 0.5 * (a @ b))
    own = [
        torch.mm(a, b, out=torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)) for a, b in (small, wide, thin)
    ]
    for mine, theirs in zip(got, own, strict=True):
        assert torch.equal(mine, theirs)
    for total, theirs in zip(sums, own, strict=False):
        torch.testing.assert_close(total, 2.5 * theirs)
    torch.testing.assert_close(in_place, 2.0 * own[0])
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        _ = a @ a


def test_torchs_own_kernels_come_back(calls: list[tuple[int, ...]]) -> None:
    a, b = operands(7, 192, 160, 144)
    outer, inner = Products(), Products()
    inner.close()
    outer.close()
    _ = a @ b
    assert len(calls) == 1
    with torch.inference_mode():
        close_to(a @ b, a, b)


def test_the_last_one_gives_torchs_kernels_back() -> None:
    a, b = operands(8, 192, 160, 144)
    before = a @ b
    Products().close()
    assert torch.equal(a @ b, before)


def test_who_multiplies_follows_the_machine_and_the_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for maker, expected in (("AuthenticAMD", "onednn"), ("GenuineIntel", "torch"), ("", "torch")):
        monkeypatch.setattr(products, "_maker", lambda maker=maker: maker)
        assert product_library() == expected
    monkeypatch.setattr(products, "_maker", lambda: "AuthenticAMD")
    assert product_library("torch") == "torch"
    assert product_library("machine", "cuda") == "torch"
    assert use_products("torch") is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert product_library() == "torch"
    assert LEAST <= 128**3
