"""Small models that a probe runs whole, and what their seconds say of the prices of single pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.pieces import make_pricer
from meshwright.cost.work import work_key
from meshwright.layout.layout import Layout
from meshwright.model.read_hf import spec_from_config

LEAST, MOST = 0.5, 2.0
"""A part in its place takes between so many times its pieces; beyond, a measurement was disturbed."""


@dataclass(frozen=True)
class Reference:
    """A Llama model: sizes of the model, of its input [batch, seq] and of its vocabulary."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    seq: int
    vocab: int

    def config(self, blocks: int) -> dict[str, Any]:
        """Return the Hugging Face config of a model of such blocks."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": blocks,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }


REFERENCES: Final = (Reference(96, 256, 3, 3, 32, 2, 64, 1024), Reference(192, 512, 6, 2, 32, 1, 192, 3072))
"""Models whose launches, products and moved bytes all count."""

ONCE: Final = ("accumulate_s", "checkpoint_s", "region_s")
"""Names of the small costs that are measured in their place (see ``DeviceRates``)."""


PARTS: Final = ("forward", "backward", "head_forward", "head_backward")
"""What of a reference is held against its pieces; ``rest_forward`` and ``rest_backward`` against the embedding's."""

MEASURED: Final = (*PARTS, "rest_forward", "rest_backward")


def pieces_seconds(cluster: ClusterSpec, one: Reference) -> dict[str, float]:
    """Return seconds of a reference's block, head (with its loss) and embedding in fp32 by their pieces.

    Raises:
        MeshwrightError: E405 when a rate is not known.
    """
    spec = spec_from_config(one.config(1), "reference", "")
    pricer = make_pricer(spec, cluster, one.seq, "fp32")
    key = work_key(Layout(precision="fp32", micro_batch=one.batch))
    block, head, embedding = pricer.block(0, key), pricer.head(key), pricer.embedding(key)
    return {
        "forward": block.forward,
        "backward": block.backward,
        "head_forward": head.forward,
        "head_backward": head.backward,
        "rest_forward": embedding.forward,
        "rest_backward": embedding.backward,
    }


def in_place_figures(cluster: ClusterSpec, measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return measured over priced seconds of ``PARTS``, geometric means over ``REFERENCES``, and a pass's own seconds.

    ``cluster`` must not have such figures yet; ``measured`` holds seconds of each reference's parts as "forward_s". One
    factor for a part, whatever it is made of: fitting products, bytes and launches apart would bend them against each
    other. ``pass_forward_s`` and ``pass_backward_s`` are what a pass takes beside blocks, head and embedding: positions,
    mask, and the model's own Python.
    """
    pieces = [pieces_seconds(cluster, one) for one in REFERENCES]
    out: dict[str, float] = {}
    for part in PARTS:
        logs = [math.log(seen[f"{part}_s"] / said[part]) for seen, said in zip(measured, pieces, strict=True)]
        out[part] = min(MOST, max(LEAST, math.exp(fmean(logs))))
    for way in ("forward", "backward"):
        rest = f"rest_{way}"
        more = [seen[f"{rest}_s"] - said[rest] for seen, said in zip(measured, pieces, strict=True)]
        out[f"pass_{way}_s"] = max(1e-9, fmean(more))
    return out
