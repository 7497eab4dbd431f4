"""Low-rank adapters (LoRA) as part of a model's description: which matrices get one, and its two tensors.

A target matrix W, [out, in], stays as it is; beside it train A, [rank, in], and B, [out, rank], and the layer computes
``W x + (alpha / rank) B A x``. A begins with uniform random numbers, B with zeros, so an untrained adapter changes
nothing (Hu et al. 2021, section 4). Their names are the target's, with ``lora_A`` and ``lora_B`` for its own:
``model.layers.3.mlp.up_proj.lora_A.weight``. Everything else of the model is frozen.

The experts of a mixture are one tensor, [experts, out, in]; every expert has factors of its own, stacked like it:
A, [experts, rank, in], and B, [experts, out, rank], named ``...experts.gate_up_proj_lora_A``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, cast

from meshwright.base.errors import MeshwrightError, Problem, nearest, problem, refuse
from meshwright.model.quantised import LEVELS
from meshwright.model.spec import AdapterSpec, BlockSpec, ModelSpec, TensorSpec

KINDS: Final = ("lora", "qlora")
MOST_RANK: Final = 65536
_DEFAULT_ROLES: Final = frozenset({"attention_in", "attention_out", "mlp_in", "mlp_out"})
"""Roles that get an adapter when no targets are named: attention and the dense feed-forward."""


def parse_adapter(text: str, where: str = "--adapter") -> AdapterSpec:
    """Return the adapter of ``lora:RANK`` or ``lora:RANK:ALPHA``; without ALPHA it is twice the rank.

    ``qlora:...`` is the same beside a base in 4 bits: nf4, its scales in 8 bits.

    Raises:
        MeshwrightError: E274 for another text.
    """
    kind, _, rest = text.strip().partition(":")
    rank_text, _, alpha_text = rest.partition(":")
    try:
        rank = int(rank_text)
        alpha = float(alpha_text) if alpha_text else 2.0 * rank
        readable = kind in KINDS and 1 <= rank <= MOST_RANK and 0.0 < alpha < 1e9
    except ValueError:
        rank, alpha, readable = 0, 0.0, False
    if not readable:
        raise MeshwrightError(problem("E274", where=where, found=repr(text)))
    return make_adapter("qlora" if kind == "qlora" else "lora", rank, alpha, ())


def make_adapter(
    kind: Literal["lora", "qlora"],
    rank: int,
    alpha: float | None,
    targets: Sequence[str],
    levels: Literal["nf4", "fp4"] = "nf4",
    double: bool = True,
) -> AdapterSpec:
    """Return an adapter; ``alpha`` None is twice the rank, no ``targets`` means attention and feed-forward.

    ``levels`` and ``double`` are of "qlora" alone.
    """
    named = tuple(dict.fromkeys(targets))
    made = AdapterSpec(kind=kind, rank=rank, alpha=2.0 * rank if alpha is None else alpha, targets=named)
    return replace(made, levels=levels, double=double) if kind == "qlora" else made


def adapter_to_dict(adapter: AdapterSpec) -> dict[str, Any]:
    """Return the JSON form of an adapter."""
    facts: dict[str, Any] = {
        "kind": adapter.kind,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "targets": list(adapter.targets),
    }
    if adapter.kind == "qlora":
        facts |= {"levels": adapter.levels, "double": adapter.double}
    return facts


def adapter_from_dict(data: Mapping[str, Any]) -> AdapterSpec:
    """Return the adapter whose ``adapter_to_dict`` is ``data``.

    Raises:
        ValueError, TypeError, KeyError: for another mapping.
    """
    targets, four = data["targets"], data["kind"] == "qlora"
    fields = {*_FIELDS, "levels", "double"} if four else set(_FIELDS)
    if data["kind"] not in KINDS or not isinstance(targets, list) or set(data) != fields:
        raise ValueError("it is not an adapter")
    if four and (data["levels"] not in LEVELS or not isinstance(data["double"], bool)):
        raise ValueError(f"its base is in {data['levels']!r}, {data['double']!r}")
    rank, alpha = data["rank"], data["alpha"]
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise ValueError(f"its rank is {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 < alpha < 1e9:
        raise ValueError(f"its alpha is {alpha!r}")
    names = cast("list[object]", targets)
    if not all(isinstance(t, str) for t in names):
        raise TypeError("its targets are not names")
    made = make_adapter("lora", rank, float(alpha), [str(t) for t in names])
    return replace(made, kind="qlora", levels=data["levels"], double=data["double"]) if four else made


_FIELDS: Final = ("kind", "rank", "alpha", "targets")


def adapted(spec: ModelSpec, adapter: AdapterSpec | None) -> ModelSpec:
    """Return ``spec`` with the adapter's tensors in its blocks; ``spec`` itself when there is no adapter.

    With a base in 4 bits every matrix of the blocks is marked as held so, whether or not it gets an adapter.

    Raises:
        MeshwrightError: E271 for targets that are no matrices of the model's blocks.
    """
    if adapter is None:
        return spec
    refuse(target_problems(spec, adapter))
    targets = target_names(spec, adapter), expert_targets(spec, adapter)
    blocks = tuple(replace(b, tensors=tuple(_with_adapters(spec, b, adapter, *targets))) for b in spec.blocks)
    return replace(spec, blocks=blocks, adapter=adapter)


def without_adapter(spec: ModelSpec) -> ModelSpec:
    """Return the model below the adapter."""
    if spec.adapter is None:
        return spec
    blocks = tuple(
        replace(b, tensors=tuple(replace(t, quantised=False) for t in b.tensors if t.role != "adapter"))
        for b in spec.blocks
    )
    return replace(spec, blocks=blocks, adapter=None)


def base_names(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the tensors that an adapter leaves frozen; none where there is no adapter."""
    if spec.adapter is None:
        return frozenset()
    return frozenset(t.name for t in spec.tensors() if t.role != "adapter")


def target_names(spec: ModelSpec, adapter: AdapterSpec) -> tuple[str, ...]:
    """Return the last parts of the module names that get an adapter ("q_proj"), in the order of the model."""
    if adapter.targets:
        layers = {leaf(t) for t in _matrices(spec)}
        return tuple(name for name in adapter.targets if name in layers)
    found = (leaf(t) for t in _matrices(spec) if t.role in _DEFAULT_ROLES)
    return tuple(dict.fromkeys(found))


def expert_targets(spec: ModelSpec, adapter: AdapterSpec) -> tuple[str, ...]:
    """Return the last two parts of the names of the experts' tensors that get an adapter ("experts.down_proj")."""
    layers = {leaf(t) for t in _matrices(spec)}
    called = expert_names(spec)
    found = [n for name in adapter.targets if name not in layers for n in called.get(name, ())]
    return tuple(dict.fromkeys(found))


def target_problems(spec: ModelSpec, adapter: AdapterSpec) -> list[Problem]:
    """Return E271 for each target that is not the name of a matrix in the blocks of ``spec``, E285 for half of one.

    E292 for experts whose matrices are stored the other way round.
    """
    called = expert_names(spec)
    known = tuple(dict.fromkeys(leaf(t) for t in _matrices(spec)))
    if called:
        known += ("experts", *called["experts"])
    problems: list[Problem] = []
    turned = any(t.transposed and t.of_experts for b in spec.blocks for t in b.tensors)
    for name in adapter.targets:
        if name in called and turned:
            found = f"{name!r} of {spec.name!r}, whose experts are stored as [experts, in, out] with biases"
            plain = [n for n in known if n != "experts" and n not in called]
            problems.append(
                problem("E292", where="adapter.targets", found=found, do=f"one of {', '.join(plain)}")
            )
            continue
        if name not in known and name in called:
            continue
        if name not in known and called and name in _SINGLE:
            found = f"{name!r} of {spec.name!r}, whose experts are stored as {', '.join(called['experts'])}"
            do = f"targets among {', '.join(called['experts'])}"
            problems.append(problem("E285", where="adapter.targets", found=found, do=do))
        elif name not in known:
            near = nearest(name, list(known))
            do = f"did you mean {' | '.join(near)}?" if near else f"one of {', '.join(known)}"
            problems.append(
                problem("E271", where="adapter.targets", found=f"{name!r} of {spec.name!r}", do=do)
            )
    if not adapter.targets and not known:
        problems.append(
            problem("E271", where="adapter.targets", found=f"{spec.name!r} has no matrix to adapt")
        )
    return problems


_SINGLE: Final = ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
"""Names of an expert's single matrices where they are not stacked, as older files have them.

peft takes them for the experts in every model that has some, also where a dense or shared feed-forward has such layers.
"""


def expert_names(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return what a user may call tensors of a mixture's experts, each with the last two parts of those it means.

    "experts" means all of them; one is "down_proj", "experts.down_proj" or "mlp.experts.down_proj". Empty without
    experts.
    """
    names = [t.name.split(".") for b in spec.blocks for t in b.tensors if _stacked(t)]
    called: dict[str, list[str]] = {}
    for parts in names:
        last = ".".join(parts[-2:])
        for name in (parts[-2], *(".".join(parts[-k:]) for k in (1, 2, 3))):
            if last not in called.setdefault(name, []):
                called[name].append(last)
    return {name: tuple(meant) for name, meant in called.items()}


def _stacked(tensor: TensorSpec) -> bool:
    """Return whether a tensor holds matrices of all experts."""
    return tensor.role in ("expert_in", "expert_out") and not tensor.is_bias


def leaf(tensor: TensorSpec) -> str:
    """Return the last part of the name of a tensor's module."""
    return tensor.name.rsplit(".", 2)[-2]


def _matrices(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Yield the matrices of the blocks that are a linear layer of their own (fused experts are not)."""
    for block in spec.blocks:
        for tensor in block.tensors:
            if _is_matrix(spec, tensor):
                yield tensor


def _is_matrix(spec: ModelSpec, tensor: TensorSpec) -> bool:
    if spec.moe is not None and leaf(tensor) in _SINGLE:
        return False
    plain = tensor.role not in ("norm", "router", "expert_in", "expert_out", "adapter")
    return plain and len(tensor.shape) == 2 and tensor.name.endswith(".weight")


def _with_adapters(
    spec: ModelSpec, block: BlockSpec, adapter: AdapterSpec, targets: Sequence[str], experts: Sequence[str]
) -> Iterator[TensorSpec]:
    four = adapter.kind == "qlora"
    for tensor in block.tensors:
        yield replace(tensor, quantised=True) if four and _is_matrix(spec, tensor) else tensor
        if _is_matrix(spec, tensor) and leaf(tensor) in targets:
            yield from adapter_tensors(spec, tensor, adapter)
        elif _stacked(tensor) and ".".join(tensor.name.split(".")[-2:]) in experts:
            yield from expert_adapter_tensors(tensor, adapter)


def factor_stem(tensor: TensorSpec) -> str:
    """Return what the names of an adapter's factors beside ``tensor`` begin with."""
    return f"{tensor.name}_lora_" if tensor.of_experts else f"{tensor.name.removesuffix('.weight')}.lora_"


def factors_beside(tensors: Iterable[TensorSpec], block: BlockSpec) -> list[TensorSpec]:
    """Return the factors of ``block`` that stand beside ``tensors``."""
    stems = tuple(factor_stem(t) for t in tensors if t.role != "adapter")
    return [t for t in block.tensors if t.role == "adapter" and t.name.startswith(stems)]


def is_second_factor(name: str) -> bool:
    """Return whether a factor of this name is a B, which begins with zeros."""
    return name.removesuffix(".weight").endswith("lora_B")


def adapter_tensors(
    spec: ModelSpec, tensor: TensorSpec, adapter: AdapterSpec
) -> tuple[TensorSpec, TensorSpec]:
    """Return A, [rank, in], and B, [out, rank], of a target matrix (GPT-2 stores its matrices as [in, out])."""
    (out, inner), (out_dim, in_dim) = tensor.shape, tensor.dims
    if tensor.transposed:
        (inner, out), (in_dim, out_dim) = tensor.shape, tensor.dims
    stem = tensor.name.removesuffix(".weight")
    return (
        TensorSpec(
            name=f"{stem}.lora_A.weight",
            shape=(adapter.rank, inner),
            dims=("lora_rank", in_dim),
            role="adapter",
        ),
        TensorSpec(
            name=f"{stem}.lora_B.weight",
            shape=(out, adapter.rank),
            dims=(out_dim, "lora_rank"),
            role="adapter",
        ),
    )


def expert_adapter_tensors(tensor: TensorSpec, adapter: AdapterSpec) -> tuple[TensorSpec, TensorSpec]:
    """Return A, [experts, rank, in], and B, [experts, out, rank], of the experts' tensor [experts, out, in]."""
    (experts, out, inner), (_, out_dim, in_dim) = tensor.shape, tensor.dims
    return (
        TensorSpec(
            name=f"{factor_stem(tensor)}A",
            shape=(experts, adapter.rank, inner),
            dims=("experts", "lora_rank", in_dim),
            role="adapter",
        ),
        TensorSpec(
            name=f"{factor_stem(tensor)}B",
            shape=(experts, out, adapter.rank),
            dims=("experts", out_dim, "lora_rank"),
            role="adapter",
        ),
    )
