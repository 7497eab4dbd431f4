"""Scores of predictions: errors by source, their mean over sources, rank, regret, coverage, out-of-memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.cost.backtest.case import Case
from meshwright.cost.collective import Floats

MEAN_KEYS = ("mape_pct", "median_ape_pct", "p95_ape_pct", "bias_pct", "spearman", "coverage_pct")


def errors(logs: Floats) -> dict[str, Any]:
    """Return the errors of log(predicted / measured)."""
    error = 100.0 * (np.exp(logs) - 1.0)
    size = np.abs(error)
    return {
        "rows": len(logs),
        "mape_pct": float(size.mean()),
        "median_ape_pct": float(np.median(size)),
        "p95_ape_pct": float(np.percentile(size, 95)),
        "bias_pct": float(error.mean()),
        "worst_pct": float(error[int(np.argmax(size))]),
    }


def spearman(predicted: Floats, measured: Floats) -> float | None:
    """Return the rank correlation, or None for fewer than three rows or no spread."""
    if len(predicted) < 3:
        return None
    a, b = _ranks(predicted), _ranks(measured)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[place]


def regrets(cases: Sequence[Case], predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Return the mean loss of running the layout predicted best, and the best measured of the three predicted best."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, case in enumerate(cases):
        groups.setdefault(case.group, []).append(place)
    one: list[float] = []
    three: list[float] = []
    for rows in groups.values():
        if len(rows) < 2:
            continue
        order = sorted(rows, key=lambda r: predicted[r])
        best = min(measured[r] for r in rows)
        one.append(100.0 * (measured[order[0]] / best - 1.0))
        three.append(100.0 * (min(measured[r] for r in order[:3]) / best - 1.0))
    return {
        "groups": len(one),
        "top1_regret_pct": float(np.mean(one)) if one else None,
        "top3_regret_pct": float(np.mean(three)) if three else None,
    }


def time_scores(cases: Sequence[Case], logs: Floats, band: Floats | None) -> dict[str, Any]:
    """Return the time scores of one source (or of any rows); ``logs`` are log(predicted / measured)."""
    measured = np.array([case.step_s for case in cases], dtype=np.float64)
    predicted = measured * np.exp(logs)
    out = errors(logs) | {"spearman": spearman(predicted, measured)} | regrets(cases, predicted, measured)
    if band is not None:
        out["coverage_pct"] = float(100.0 * np.mean(np.abs(logs) <= band))
    return out


def over_sources(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over sources: each source counts once, however many rows it has."""
    out: dict[str, Any] = {"averaged_over": "sources", "sources": len(scores)}
    out["rows"] = sum(int(s["rows"]) for s in scores.values())
    for key in (*MEAN_KEYS, "top1_regret_pct", "top3_regret_pct"):
        values = [float(s[key]) for s in scores.values() if s.get(key) is not None]
        out[key] = float(np.mean(values)) if values else None
    out["abs_bias_pct"] = (
        float(np.mean([abs(float(s["bias_pct"])) for s in scores.values()])) if scores else None
    )
    return out


def oom_scores(
    probability: Floats, ran_out: np.ndarray[Any, np.dtype[np.bool_]], gate: float
) -> dict[str, Any]:
    """Return counts of layouts that ran out and were not told so, and the other way round."""
    told = probability > gate
    misses, false = int((ran_out & ~told).sum()), int((~ran_out & told).sum())
    out, ran = int(ran_out.sum()), int((~ran_out).sum())
    return {
        "oom_rows": out,
        "oom_ran_rows": ran,
        "oom_false_negatives": misses,
        "oom_false_positives": false,
        "oom_recall_pct": 100.0 * (1.0 - misses / out) if out else None,
        "oom_false_alarm_pct": 100.0 * false / ran if ran else None,
        "oom_probability_gate": gate,
    }
