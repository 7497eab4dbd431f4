"""The parity section: what `meshwright prove` found, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.base.units import format_bytes
from meshwright.report.blocks import Block, Grid, Note
from meshwright.report.source import Source, listed, number, table, tables


def scientific(value: Any) -> str:
    """Return a difference as text: 2.1e-12, 0, infinite, or - when there is none."""
    if isinstance(value, float) and math.isinf(value):
        return "infinite"
    found = number(value)
    if found is None:
        return "-"
    return "0" if found == 0 else f"{found:.1e}"


def worst_name(value: Any) -> str:
    """Return the worst tensor's name and step, from its JSON form or a plain name; "" when there is none."""
    found = table(value)
    if not found:
        return str(value) if isinstance(value, str) else ""
    name, step = found.get("tensor") or found.get("name"), found.get("step")
    return (f"{name} (step {step})" if step is not None else str(name)) if name else ""


def ledger_rows(value: Any) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (kind, axis) to (count, bytes) of a ledger in its JSON form."""
    rows: dict[tuple[str, str], tuple[float, float]] = {}
    for line in tables(value):
        key = (str(line.get("kind", "")), str(line.get("axis", "")))
        count, num_bytes = rows.get(key, (0.0, 0.0))
        rows[key] = (
            count + (number(line.get("count")) or 0),
            num_bytes + (number(line.get("num_bytes")) or 0),
        )
    return rows


def proof_blocks(source: Source) -> tuple[Block, ...]:
    """Return the parity section, or what to run to get one."""
    prove = source.prove
    if not prove:
        why = source.unreadable.get("prove.json")
        return (
            Note(
                text=f"prove.json cannot be read: {why}"
                if why
                else "Parity was not checked: there is no prove.json here. `meshwright prove RUN.yaml --layout LAYOUT` "
                "compares the layout with one device.",
                tone="missing",
            ),
        )
    passed = bool(prove.get("passed"))
    steps = number(prove.get("steps"))
    blocks: list[Block] = [
        Note(
            text=("Passed: " if passed else "Failed: ")
            + f"the layout {'computes' if passed else 'does not compute'} what one device computes, within the stated "
            f"tolerances, over {int(steps) if steps else 'an unknown number of'} steps from the same weights and "
            "batches.",
            tone="good" if passed else "bad",
        ),
        _differences(prove),
    ]
    failed = [name.replace("_", " ") for name, good in table(prove.get("checks")).items() if not good]
    if failed:
        blocks.append(Note(text=f"Checks that failed: {', '.join(failed)}.", tone="bad"))
    missing = [str(name) for name in listed(table(prove.get("gradients")).get("missing"))]
    if missing:
        blocks.append(
            Note(text=f"Gradients that were missing ({len(missing)}): {', '.join(missing[:20])}", tone="bad")
        )
    sentinel = table(prove.get("sentinel"))
    if sentinel:
        blocks.append(
            Note(
                text=f"Sentinel: {sentinel.get('tensors', 'all tensors')} off by one factor, {sentinel.get('factor')}. "
                f"Likely cause: {sentinel.get('cause')}",
                tone="bad",
            )
        )
    else:
        blocks.append(
            Note(text="Sentinel: no constant factor was found between the gradients and the reference.")
        )
    complete = table(prove.get("placement")).get("complete")
    if complete is not None:
        blocks.append(
            Note(
                text="Placement: every parameter is held exactly once per replica."
                if complete
                else "Placement: some parameter is not held exactly once per replica.",
                tone="good" if complete else "bad",
            )
        )
    ledger = table(prove.get("ledger"))
    if ledger:
        blocks.append(_ledger(ledger))
    return tuple(blocks)


def _differences(prove: Mapping[str, Any]) -> Grid:
    tolerance = table(prove.get("tolerance"))
    rows: list[tuple[str, ...]] = []
    for key, name, figure, unit in (
        ("loss", "loss", "max_abs_diff", "absolute, nats per token"),
        ("gradients", "gradients", "max_rel_diff", "relative"),
        ("grad_norm", "gradient norm", "max_rel_diff", "relative"),
        ("weights", "weights after the step", "max_rel_diff", "relative"),
    ):
        found = table(prove.get(key))
        if not found:
            continue
        allowed = tolerance.get(key)
        allowed = table(allowed).get(figure, allowed) if isinstance(allowed, Mapping) else allowed
        worst = worst_name(found.get("worst")) or "-"
        rows.append((name, scientific(found.get(figure)), scientific(allowed), unit, worst))
    return Grid(
        title="Largest difference from one device",
        head=("quantity", "difference", "allowed", "kind", "worst tensor"),
        rows=tuple(rows),
        caption=(
            "Relative difference of a tensor = max |g - ref| / max(max |ref|, 1e-6 of the largest |ref| of all "
            "tensors); the figure is the worst over tensors and steps. 1e-12 in float64 means equal but for the "
            "order of additions."
        ),
        numeric=frozenset({1, 2}),
    )


def _ledger(ledger: Mapping[str, Any]) -> Block:
    matches = ledger.get("matches")
    expected, recorded = ledger_rows(ledger.get("expected")), ledger_rows(ledger.get("recorded"))
    if not expected and not recorded:
        return Note(text=f"Ledger: {'matches' if matches else 'does not match'}; it lists no collective.")
    rank = number(ledger.get("rank"))
    whose = f" of rank {int(rank)}" if rank is not None else ""
    rows: list[tuple[str, ...]] = []
    for key in sorted(expected | recorded):
        e, r = expected.get(key, (0.0, 0.0)), recorded.get(key, (0.0, 0.0))
        rows.append(
            (
                *key,
                f"{e[0]:.0f}",
                f"{r[0]:.0f}",
                format_bytes(e[1]),
                format_bytes(r[1]),
                "equal" if e == r else "differs",
            )
        )
    return Grid(
        title=f"Ledger{whose}: expected and recorded collectives {'agree' if matches else 'differ'}",
        head=("collective", "axis", "expected count", "recorded", "expected payload", "recorded", ""),
        rows=tuple(rows),
        caption=(
            "Expected is what the step program says before the run; recorded is what the real step did. Payload is the "
            "full tensor of each collective, summed over one step, padding included."
        ),
        numeric=frozenset({2, 3, 4, 5}),
    )
