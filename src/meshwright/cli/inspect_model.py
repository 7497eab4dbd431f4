"""``meshwright inspect``: what a model is, counted from its config.json."""

from __future__ import annotations

from meshwright.cli.options import Json, MaybeSeqLen, Model
from meshwright.cli.output import show_json, table


def inspect_model(model: Model, seq_len: MaybeSeqLen = None, as_json: Json = False) -> None:
    """Show a model's parameters, shape and FLOPs per token, from its config.json alone.

    Example: meshwright inspect llama-2-7b --seq-len 4096
    """
    from meshwright.base.units import format_count
    from meshwright.model.describe import block_lines, describe
    from meshwright.model.read_hf import read_model

    spec = read_model(model)
    facts = describe(spec, seq_len)
    if as_json:
        show_json(facts)
        return
    flops = facts["flops_per_token"]
    active = facts["num_active_parameters"]
    rows = [
        ("architecture", f"{facts['architecture']} ({facts['family']})"),
        ("parameters", f"{facts['num_parameters']:,} ({format_count(facts['num_parameters'])})"),
        ("layers", str(facts["num_layers"])),
        ("hidden size", str(facts["hidden_size"])),
        ("heads", f"{facts['num_attention_heads']} query, {facts['num_key_value_heads']} key/value"),
        ("vocabulary", f"{facts['vocab_size']:,}{', tied head' if facts['tied_embeddings'] else ''}"),
        ("positions", f"{facts['max_position_embeddings']:,}"),
        (
            "FLOPs per token",
            f"{format_count(flops['causal'])} causal, {format_count(flops['full'])} full attention "
            f"(forward + backward, sequence {facts['seq_len']})",
        ),
    ]
    if active != facts["num_parameters"]:
        rows.insert(2, ("active", f"{active:,} ({format_count(active)}) per token"))
    if facts["flags"]:
        rows.append(("notes", "; ".join(facts["flags"])))
    print(table(("model", spec.name), rows))
    print()
    print("\n".join(block_lines(spec)))
