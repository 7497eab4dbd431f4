"""ModelSpec: a model as named tensors and blocks, without torch.

Tensor names are those of the Hugging Face module (``model.layers.3.mlp.up_proj.weight``), so that one
name serves the spec, the runtime, a checkpoint and a proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

Role: TypeAlias = Literal[
    "embedding",  # token embedding                     [vocab, hidden]
    "position",  # learned positions                    [positions, hidden]
    "attention_in",  # q, k, v or fused, or MLA up/down projections: cut by output rows under tp
    "attention_out",  # output projection: cut by input columns under tp
    "mlp_in",  # gate, up or fused
    "mlp_out",  # down
    "router",  # expert router
    "expert_in",  # routed experts' gate/up
    "expert_out",  # routed experts' down
    "shared_in",  # shared expert's gate/up (and its gate)
    "shared_out",  # shared expert's down
    "norm",
    "head",  # language-model head                      [vocab, hidden]
    "adapter",  # a low-rank factor beside a matrix          [rank, in] and [out, rank], with [experts, ...] before
]


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Low-rank adapters beside the matrices of every block; see ``model.adapters``.

    Attributes:
        kind: "lora", or "qlora": the frozen matrices of the blocks are held in 4 bits (see ``model.quantised``).
        rank: rows of A and columns of B.
        alpha: the product B A is scaled by alpha / rank.
        targets: last parts of the names of the modules that get one; none means attention and feed-forward.
        levels: of "qlora", the sixteen values that a weight can have: "nf4" or "fp4".
        double: of "qlora", whether the blocks' scales are held in 8 bits.
    """

    kind: Literal["lora", "qlora"]
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    levels: Literal["nf4", "fp4"] = "nf4"
    double: bool = True


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One logical parameter.

    Attributes:
        name: the Hugging Face parameter name.
        shape: its sizes, as stored.
        dims: one name per dim ("vocab", "hidden", "heads*head_dim", "kv_heads*head_dim", "ffn", "experts", ...).
        role: what it does, which decides how an axis cuts it.
        is_bias: a bias (or another 1-D companion) of the matrix with the same role.
        tied_to: the name of the tensor whose storage it shares; such a tensor is not counted.
        transposed: a matrix stored as [in, out].
        quantised: held in 4 bits (see ``model.quantised``): frozen, whole on every rank of a data-parallel group.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    role: Role
    is_bias: bool = False
    tied_to: str | None = None
    transposed: bool = False
    quantised: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Whether it is of a mixture's experts: their matrices, or an adapter's factors beside them."""
        if self.role == "adapter":
            return self.dims[0] == "experts"
        return self.role in ("expert_in", "expert_out")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of a model: grouped-query ("gqa", which includes MHA and MQA) or latent ("mla")."""

    kind: Literal["gqa", "mla"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    qk_norm: bool = False
    rope: bool = True
    sliding_window: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Mixture of experts: routed experts of width ``ffn_size`` each, and shared ones."""

    num_experts: int
    experts_per_token: int
    ffn_size: int
    num_shared_experts: int = 0
    shared_ffn_size: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One repeated block (layer).

    Attributes:
        ffn_size: the dense MLP's width (0 in a MoE block).
        norms: where the norms of the hidden states stand: before attention and feed-forward, around them, after
            them, or one before both ("shared", in a parallel block); among ``tensors`` they come in the order in which
            they are computed.
        parallel: attention and feed-forward both read the block's input, and it is added to both.
    """

    index: int
    kind: Literal["dense", "moe"]
    ffn_size: int
    tensors: tuple[TensorSpec, ...]
    sliding_window: int | None = None
    moe: MoESpec | None = None
    norms: Literal["before", "around", "after", "shared"] = "before"
    parallel: bool = False

    @property
    def num_parameters(self) -> int:
        """Parameters in this block."""
        return sum(t.numel for t in self.tensors if t.tied_to is None)

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm stands behind the block's last sum."""
        return "after" in NORM_PLACES[self.norms]

    def norm_tensors(self, part: Literal["attention", "mlp"]) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return the tensors of the norms of hidden states before and after attention or the feed-forward."""
        norms = [t for t in self.tensors if t.role == "norm" and t.dims == ("hidden",)]
        if self.norms == "shared":
            return norms, []
        names = list(dict.fromkeys(t.name.rpartition(".")[0] for t in norms))
        places = [(p, at) for p in ("attention", "mlp") for at in NORM_PLACES[self.norms]]

        def at(place: str) -> list[TensorSpec]:
            found = [n for n, where in zip(names, places, strict=True) if where == (part, place)]
            return [t for t in norms if t.name.rpartition(".")[0] in found]

        return at("before"), at("after")


NORM_PLACES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"before": ("before",), "around": ("before", "after"), "after": ("after",), "shared": ("before",)}
)
"""The norms beside attention, and beside the feed-forward, by ``BlockSpec.norms``."""


@dataclass(frozen=True, kw_only=True)
class ModulePaths:
    """Where the parts of the Hugging Face module are; dotted paths below the causal-LM module.

    Attributes:
        base: the decoder without the head ("model", "transformer").
        embedding: token embedding.
        positions: learned position embedding or "".
        blocks: the list of repeated blocks.
        final_norm: norm after the last block.
        head: language-model head.
        embedding_extras: modules applied to the embedding only (dropout), which later stages must skip.
    """

    base: str
    embedding: str
    blocks: str
    final_norm: str
    head: str
    positions: str = ""
    embedding_extras: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A causal language model as a description: frozen, hashable by content, printable.

    Attributes:
        name: what the user called it.
        family: our family name ("llama", "gpt2", "qwen3_moe", ...).
        architecture: the transformers class ("LlamaForCausalLM").
        embedding: tensors before the first block (token embedding, learned positions).
        blocks: the repeated blocks in order.
        final: tensors after the last block and before the head (final norm).
        head: head tensors; with ``tied_embeddings`` its weight has ``tied_to`` set.
        config: the text part of the config.json as read (nested text_config unwrapped).
        adapter: the adapter whose tensors are among those of the blocks, or None; all others are then frozen.
        flags: short notes a user should see ("MoE", "more than 40 layers", "context above 8192", ...).
    """

    name: str
    family: str
    architecture: str
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int
    attention: AttentionSpec
    moe: MoESpec | None
    tied_embeddings: bool
    gated_mlp: bool
    activation: str
    norm: Literal["rmsnorm", "layernorm"]
    dropout: float
    embedding: tuple[TensorSpec, ...]
    blocks: tuple[BlockSpec, ...]
    final: tuple[TensorSpec, ...]
    head: tuple[TensorSpec, ...]
    paths: ModulePaths
    flags: tuple[str, ...] = ()
    source: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    adapter: AdapterSpec | None = None

    @property
    def num_layers(self) -> int:
        """Number of repeated blocks."""
        return len(self.blocks)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.attention.num_kv_heads

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor in module order; a tied head comes last with ``tied_to`` set."""
        yield from self.embedding
        for block in self.blocks:
            yield from block.tensors
        yield from self.final
        yield from self.head

    @property
    def num_parameters(self) -> int:
        """Logical parameters, a tied tensor counted once."""
        return sum(t.numel for t in self.tensors() if t.tied_to is None)
