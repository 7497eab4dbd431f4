"""Building the user's model: transformers' own class, from its config, unchanged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.mesh.imports import MODEL_CODE, load_modules
from meshwright.model.spec import ModelSpec
from meshwright.parallel.deferred import Deferred
from meshwright.program import units

ROUTER_LOSS = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss")
"""Model types whose router loss is built (see ``parallel.router_loss``)."""

OUTPUTS: Final = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""What the step reads of a model's answer, whatever the config says: hidden states by name, and nothing kept beside."""


def config_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Return what a config asks for that is not done: E547 router loss, E560 quantised weights, W543 custom code."""
    problems: list[Problem] = []
    if config.get("output_router_logits") and config.get("model_type") not in ROUTER_LOSS:
        problems.append(
            problem(
                "E547", where="model.config.output_router_logits", found="true, so the loss has a router term"
            )
        )
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        problems.append(
            problem(
                "E560", where="model.config.quantization_config", found=f"weights are quantised ({method})"
            )
        )
    if config.get("auto_map"):
        problems.append(
            problem("W543", where="model.config.auto_map", found="the config names Python code of its own")
        )
    return problems


def build_model(
    config: Mapping[str, Any],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
    pending: Deferred | None = None,
) -> nn.Module:
    """Return the causal language model of ``config`` with all its layers, initial weights drawn from ``seed``.

    The draw happens in float32 on the CPU in module order, so that it does not depend on layout, rank or dtype.
    ``weights`` replace it (every tensor by name, tied heads may be left out). ``device="meta"`` makes shapes only.
    ``pending``: large parameters are described, not made (see ``parallel.deferred``).

    Raises:
        MeshwrightError: E811 when transformers cannot build it, and what ``config_problems`` says.
    """
    refuse(config_problems(config))
    load_modules(MODEL_CODE)
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype", "model_type", "auto_map")}
    keys = copy.deepcopy(keys) | OUTPUTS  # transformers completes nested values in place
    try:
        hf_config = AutoConfig.for_model(config["model_type"], **keys)
        torch.manual_seed(seed)
        kind: Any = AutoModelForCausalLM._model_mapping[type(hf_config)]
        attention = (
            "sdpa" if kind._supports_sdpa else "eager"
        )  # soft-capped scores and ALiBi have no fused kernel
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
        if _has_experts(config) and (dtype == torch.float64 or not _groups_rows(hf_config)):
            hf_config._experts_implementation = "eager"  # one by one: what torch's grouped matmul refuses
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(hf_config, **options)
    except Exception as error:  # a wrong field can surface as any exception of transformers or torch
        said = " ".join(str(error).split())[:300]
        raise MeshwrightError(
            problem(
                "E811",
                where="model.config",
                found=f"transformers could not build model_type {config.get('model_type')!r}: "
                f"{type(error).__name__}: {said}",
            )
        ) from error
    if weights is not None:
        if pending is not None and pending.active:
            names = set(model.state_dict())
            missing, unexpected = sorted(names - set(weights)), sorted(set(weights) - names)
        else:
            missing, unexpected = model.load_state_dict(dict(weights), strict=False)
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        left = [m for m in missing if m not in tied]
        if left or unexpected:
            raise MeshwrightError(
                problem(
                    "E811",
                    where="model.weights",
                    found=f"{len(left)} tensors missing ({', '.join(left[:3])}), "
                    f"{len(unexpected)} unexpected ({', '.join(unexpected[:3])})",
                    needs="the weights of this very model",
                    do="name the folder that belongs to model.config",
                )
            )
    model.train()
    model.to(dtype)
    if weights is not None and pending is not None and pending.active:
        pending.read_from(model.named_parameters(), weights)
    return model


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(k in config for k in ("num_local_experts", "num_experts", "n_routed_experts"))


def _groups_rows(config: Any) -> bool:
    """Return whether the rows of the experts' matrices are multiples of 16 bytes, in 2-byte dtypes too."""
    widths = (
        getattr(config, name, None) for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")
    )
    return all(width % 8 == 0 for width in widths if isinstance(width, int))


def frozen_names(spec: ModelSpec, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the names that ``patterns`` (shell wildcards) freeze; a tied head follows its embedding.

    Raises:
        MeshwrightError: E812 for a pattern without a match.
    """
    refuse(
        [
            problem("E812", where="freeze", found=f"{pattern!r} matches no parameter")
            for pattern in patterns
            if not any(fnmatchcase(t.name, pattern) for t in spec.tensors())
        ]
    )
    return units.frozen_names(spec, patterns)
