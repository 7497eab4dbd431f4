"""Reading a Hugging Face config.json into a ModelSpec, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from meshwright.base.errors import MeshwrightError, nearest, problem
from meshwright.model import catalogue
from meshwright.model.activations import always_unfused
from meshwright.model.families import BY_ARCHITECTURE, BY_MODEL_TYPE, Family
from meshwright.model.fields import Fields
from meshwright.model.numbers import note_impossible_numbers
from meshwright.model.spec import ModelSpec

MANY_LAYERS = 40
LONG_CONTEXT = 8192


def read_model(target: str) -> ModelSpec:
    """Return the ModelSpec of a folder with a config.json, of that file, or of a catalogue name.

    Raises:
        MeshwrightError: E120 not found, E121 not a JSON object, E122 fields missing, E123 wrong values,
            E124 unknown model type, E125 variant not built; all findings of the config at once.
    """
    path = _existing(target)
    if path is not None and path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise MeshwrightError(
                problem("E120", where=target, found="this folder holds no config.json", do=_folder_hint(path))
            )
    if path is not None:
        folder = path.resolve().parent.name
        name = folder if path.name == "config.json" and folder else path.stem
        return spec_from_config(read_config(path), name, source=str(target))
    entry = catalogue.find(target)
    if entry is not None:
        return spec_from_config(entry.config, entry.name, source=f"catalogue: {entry.source}")
    names = [e.name for e in catalogue.entries()]
    like = nearest(target, names, 4)
    raise MeshwrightError(
        problem(
            "E120",
            where=target,
            found="no such folder, file or catalogue name",
            do=f"did you mean {' | '.join(like)}" if like else "",
        )
    )


def _existing(target: str) -> Path | None:
    try:
        path = Path(target).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # a name no file can have, or an unknown user after ~
        return None


def _folder_hint(path: Path) -> str:
    folders = sorted(p.parent.name for p in path.parent.glob("*/config.json"))[:4]
    return f"did you mean {' | '.join(str(path.parent / f) for f in folders)}" if folders else ""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"written twice: {', '.join(twice)}")
    return out


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in the file.

    Raises:
        MeshwrightError: E121 with the line and column where reading stopped.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        found = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise MeshwrightError(problem("E121", where=str(path), found=found)) from None
    except (ValueError, RecursionError, OSError) as error:
        found = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise MeshwrightError(problem("E121", where=str(path), found=found)) from None
    if not isinstance(value, dict):
        found = f"line 1, column 1: the top level is a {type(value).__name__}, not an object"
        raise MeshwrightError(problem("E121", where=str(path), found=found))
    return cast("Mapping[str, Any]", value)


def spec_from_config(config: Mapping[str, Any], name: str, source: str = "") -> ModelSpec:
    """Return the ModelSpec of a config as read from JSON, of either generation of field names.

    A multimodal config with a ``text_config`` of a known family is read as that text part.

    Raises:
        MeshwrightError: E122, E123, E124 or E125.
    """
    inner = _mapping(config.get("text_config"))
    nested = inner is not None and str(inner.get("model_type", config.get("model_type"))) in BY_MODEL_TYPE
    part = inner if inner is not None and nested else config
    family = _family(part, config, name)
    fields = Fields(part, name)
    note_impossible_numbers(fields, family.name)
    spec = family.build(fields, family, source)
    return replace(spec, flags=_flags(spec, config, nested))


def _family(part: Mapping[str, Any], config: Mapping[str, Any], name: str) -> Family:
    """Return the family that ``model_type``, or else ``architectures``, names."""
    kind = part.get("model_type", config.get("model_type"))
    if isinstance(kind, str) and kind in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[kind]
    listed = part.get("architectures")
    classes = [str(c) for c in cast("list[Any]", listed)] if isinstance(listed, list) else []
    for cls in classes:
        if cls in BY_ARCHITECTURE and kind is None:
            return BY_ARCHITECTURE[cls]
    if kind is None and not classes:
        raise MeshwrightError(
            problem(
                "E122",
                where=name,
                found="config.json lacks model_type",
                needs=f"model_type, one of {', '.join(sorted(BY_MODEL_TYPE))}",
            )
        )
    said = f"model_type {kind!r}" if kind is not None else f"architectures {classes!r}"
    known = BY_MODEL_TYPE if kind is not None else BY_ARCHITECTURE
    like = nearest(str(kind) if kind is not None else classes[0], known)
    hint = f"; nearest: {' | '.join(like)}" if like else ""
    raise MeshwrightError(
        problem(
            "E124",
            where=f"{name}: model_type",
            found=f"{said} is not a known family{hint}",
            needs=f"one of {', '.join(sorted(BY_MODEL_TYPE))}",
        )
    )


def _flags(spec: ModelSpec, config: Mapping[str, Any], nested: bool) -> tuple[str, ...]:
    """Return the short notes that a user should see."""
    listed = config.get("architectures")
    classes = [str(c) for c in cast("list[Any]", listed)] if isinstance(listed, list) else []
    other = [c for c in classes if c != spec.architecture]
    quantised = _mapping(config.get("quantization_config"))
    method = quantised.get("quant_method") if quantised else None
    notes = (
        ("MoE", spec.moe is not None),
        ("MLA", spec.attention.kind == "mla"),
        ("tied embeddings", spec.tied_embeddings),
        ("more than 40 layers", spec.num_layers > MANY_LAYERS),
        ("context above 8192", spec.max_position_embeddings > LONG_CONTEXT),
        ("sliding window", any(b.sliding_window for b in spec.blocks)),
        ("unequal blocks", len({b.num_parameters for b in spec.blocks}) > 1),
        ("dropout", spec.dropout > 0),
        ("attention scores kept in memory (no fused attention in this family)", always_unfused(spec)),
        ("text part of a multimodal model", nested),
        ("custom code, not executed", bool(config.get("auto_map"))),
        (f"weights stored quantised ({method}), read as full precision", bool(quantised)),
        (f"architectures says {', '.join(other)}, read as {spec.architecture}", bool(other) and not nested),
        ("multi-token prediction not built", bool(config.get("num_nextn_predict_layers"))),
    )
    return tuple(text for text, holds in notes if holds)


def _mapping(value: object) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None
