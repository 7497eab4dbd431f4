"""The run file that ``meshwright init`` writes: every key with its meaning, what is optional commented out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby

from meshwright.base.units import format_count
from meshwright.config.schema import NOT_HONOURED, described_keys
from meshwright.model.spec import ModelSpec

_COLUMN = 34


def run_file_text(spec: ModelSpec, target: str) -> str:
    """Return a commented run file for the model that was read from ``target``."""
    values: Mapping[str, str] = {
        "model.config": json.dumps(target, ensure_ascii=False),
        "data.path": "python-docs",
        "data.seq_len": str(min(512, spec.max_position_embeddings)),
        "batch.sequences": "16",
        "optimizer.lr": "3e-4",
        "schedule.name": "cosine",
        "schedule.warmup_steps": "10",
        "clip.max_norm": "1.0",
        "layout": "auto",
        "run.steps": "100",
        "run.seed": "0",
    }
    head = [
        f"# {spec.name}: {spec.architecture}, {format_count(spec.num_parameters)} parameters, "
        f"{spec.num_layers} layers, {spec.num_heads} heads, {spec.num_kv_heads} key/value heads",
        "# Check it: meshwright config show FILE --origin. Run it: meshwright train FILE.",
        "# A line that begins with # names a default; remove the # to change it.",
    ]
    keys = [row for row in described_keys() if row[0] not in NOT_HONOURED]
    lines: list[str] = []
    for section, rows in groupby(keys, key=lambda row: row[0].partition(".")[0]):
        held = list(rows)
        whole = all(key not in values for key, *_ in held)
        if "." in held[0][0]:
            lines += ["", f"# {section}:" if whole else f"{section}:"]
        else:
            lines.append("")
        for key, _, default, meaning in held:
            name = key.rpartition(".")[2]
            indent = "  " if "." in key else ""
            if key in values:
                text = f"{indent}{name}: {values[key]}"
            else:
                text = f"# {indent}{name}: {default}" if whole else f"{indent}# {name}: {default}"
            lines.append(f"{text:<{_COLUMN}} # {meaning}")
    return "\n".join([*head, *lines, ""])
