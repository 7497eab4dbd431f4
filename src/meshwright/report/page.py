"""The report: one self-contained HTML page of a run folder or a plan."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshwright import __version__
from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.files import write_whole
from meshwright.report.blocks import Block, Note, Ranks, Section
from meshwright.report.derived import MAX_EXPLAINED, derive_plan, machine, rank_texts
from meshwright.report.facts import (
    cards,
    event_blocks,
    header,
    model_name,
    peak_bytes,
    precision_blocks,
    setting_blocks,
    why_blocks,
    world_size,
)
from meshwright.report.glossary import terms_in
from meshwright.report.links import link_blocks
from meshwright.report.memory import memory_blocks
from meshwright.report.proof import proof_blocks
from meshwright.report.ranks import layout_from_dict, layout_text, mesh_blocks
from meshwright.report.source import Source, number, read_source
from meshwright.report.timeline import timeline_blocks
from meshwright.report.timing import median_step_s, time_blocks
from meshwright.report.training import training_blocks


def write_report(target: str, out: str | None) -> Path:
    """Write the page of ``target`` (a run folder or a plan.json) and return its path.

    Without ``out`` the page is RUN_DIR/report.html, or report.html beside the plan. It is written under a
    temporary name and renamed, so no reader sees half a page.

    Raises:
        MeshwrightError: E850, E851, E852 when there is nothing to read; E853 when the page cannot be written.
    """
    source = read_source(target)
    folder = source.path if source.is_run else source.path.parent
    path = Path(out) if out is not None else folder / "report.html"
    _write(path, render(source))
    return path


def _write(path: Path, page: str) -> None:
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        write_whole(path, page)
    except OSError as error:
        raise MeshwrightError(
            problem("E853", where=str(path), found=str(error)), ExitCode.ENVIRONMENT
        ) from error


def render(source: Source) -> str:
    """Return the page as HTML text."""
    package = files("meshwright.report")
    css = package.joinpath("page.css").read_text(encoding="utf-8")
    js = package.joinpath("page.js").read_text(encoding="utf-8")
    sections, texts = _sections(source)
    head = header(source)
    shown = cards(source)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string(package.joinpath("page.html.j2").read_text(encoding="utf-8"))
    notes = [
        Note(text=f"{name} is damaged and was left out: {reason}", tone="bad")
        for name, reason in source.unreadable.items()
    ]
    return template.render(
        csp=policy(css, js),
        css=Markup(css),
        js=Markup(js),
        header=head,
        notes=notes,
        cards=shown,
        sections=sections,
        glossary=terms_in(_words(sections, shown)),
        island=island(_figures(source) | _rank_lines(texts)),
        version=__version__,
    )


def policy(css: str, js: str) -> str:
    """Return the content security policy: nothing is loaded, and only this style and this script run."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src 'sha256-{digest(css)}'; script-src 'sha256-{digest(js)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def island(value: Mapping[str, Any]) -> Markup:
    """Return ``value`` as JSON that is safe inside a script element; what is not finite becomes null."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in cast("Sequence[Any]", value)]
    return value


def _sections(source: Source) -> tuple[tuple[Section, ...], dict[int, str]]:
    derived = derive_plan(source)
    known = machine(source)
    layout = layout_from_dict(source.layout) if source.layout else None
    texts = rank_texts(derived)
    sections = (
        Section(name="why", title="Why this plan", blocks=why_blocks(source)),
        Section(
            name="mesh",
            title="The mesh",
            blocks=mesh_blocks(layout, known.gpus_per_node, known.node_from),
        ),
        Section(name="timeline", title="One step on the clock", blocks=timeline_blocks(source, derived)),
        Section(
            name="memory-section",
            title="Memory",
            blocks=memory_blocks(source, known.capacity, known.capacity_from),
        ),
        Section(name="time", title="Step time", blocks=time_blocks(source)),
        Section(name="training", title="Training", blocks=training_blocks(source)),
        Section(name="parity", title="Parity with one device", blocks=proof_blocks(source)),
        Section(name="link-section", title="Links", blocks=link_blocks(source)),
        Section(name="precision", title="Precision", blocks=precision_blocks(source, layout)),
        Section(
            name="ranks",
            title="What each rank does",
            blocks=_rank_blocks(texts, derived.trouble),
            folded=True,
        ),
        Section(name="events", title="Events", blocks=event_blocks(source), folded=True),
        Section(
            name="settings",
            title="Settings and where they came from",
            blocks=setting_blocks(source),
            folded=True,
        ),
    )
    return sections, texts


def _rank_blocks(texts: Mapping[int, str], trouble: str) -> tuple[Block, ...]:
    if not texts:
        return (Note(text=f"What each rank does cannot be told: {trouble}.", tone="missing"),)
    ranks = tuple(sorted(texts))
    blocks: list[Block] = [
        Note(
            text="Derived from the plan: the groups, the stage, what the rank holds, and every action of one step in "
            "order. Choose a rank, or click one in the mesh."
        ),
        Ranks(first=texts[ranks[0]], ranks=ranks),
    ]
    if len(ranks) == MAX_EXPLAINED:
        blocks.append(
            Note(
                text=f"The first {MAX_EXPLAINED} ranks are here; `meshwright explain PLAN --rank N` tells any rank."
            )
        )
    return tuple(blocks)


def _rank_lines(texts: Mapping[int, str]) -> dict[str, Any]:
    """Return each rank's text as indices into one list of different lines: ranks share most of theirs."""
    index: dict[str, int] = {}
    ranks = {
        str(rank): [index.setdefault(line, len(index)) for line in text.split("\n")]
        for rank, text in texts.items()
    }
    return {"lines": list(index), "rank_texts": ranks}


def _figures(source: Source) -> dict[str, Any]:
    """Return the page's main figures for programs, SI units in the key."""
    losses = [number(row.get("loss")) for row in source.metrics]
    return {
        "model": model_name(source),
        "layout": layout_text(source.layout) if source.layout else None,
        "world_size": world_size(source),
        "plan_hash": source.run.get("plan_hash"),
        "steps": len(source.metrics),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "predicted_step_time_s": number(source.prediction.get("step_time_s")),
        "measured_step_time_s": median_step_s(source),
        "predicted_peak_memory_bytes": peak_bytes(source.prediction),
        "measured_peak_memory_bytes": peak_bytes(source.measurement),
        "parity_passed": source.prove.get("passed"),
        "damaged_lines": dict(source.damaged),
    }


def _words(sections: Sequence[Section], shown: Sequence[Any]) -> str:
    """Return all words that the page says, for choosing its glossary."""
    said = [f"{card.title} {card.detail}" for card in shown]
    for section in sections:
        said.append(section.title)
        for block in section.blocks:
            for name in ("title", "caption", "text", "first", "legend"):
                said.append(str(getattr(block, name, "")))
            said += list(getattr(block, "sentences", ())) + list(getattr(block, "head", ()))
            for row in getattr(block, "rows", ()):
                said.append(str(row[0]))
    return "\n".join(said)
