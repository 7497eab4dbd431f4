"""The run as values: nothing is left as "auto" but the layout, and every value says where it came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.config.load import LoadedRun
from meshwright.config.schema import NOT_HONOURED, shown
from meshwright.layout.batch import derive_batch
from meshwright.layout.parse import parse_layout
from meshwright.model.adapters import make_adapter
from meshwright.model.spec import AdapterSpec

PYTHON_DOCS = "python-docs"


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is trained: a description and, or not, pretrained weights."""

    config: str
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What it is trained on: one path, or several sources as (path, weight)."""

    path: str | None = None
    sources: tuple[tuple[str, float], ...] = ()
    tokenizer: str | None = None
    seq_len: int
    format: Literal["text", "chat", "completion"] | None = None
    text_field: str = "text"
    chat_template: str | None = None
    rows: Literal["stream", "pack", "pad"] | None = None
    too_long: Literal["refuse", "split", "truncate", "skip"] | None = None
    eval_fraction: float = 0.0
    epochs: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Sequences per optimizer step; ``accumulation`` is only what the user stated, if anything."""

    sequences: int
    accumulation: int | None


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How weights are updated."""

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate over the steps."""

    name: str
    warmup_steps: int
    min_lr_ratio: float


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """The largest gradient norm, or None for no clipping."""

    max_norm: float | None


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run itself; intervals of 0 mean only at the end."""

    dir: str
    steps: int
    seed: int
    checkpoint_every: int
    checkpoint_async: bool
    keep_last: int | None
    keep_every: int
    keep_best: bool
    eval_every: int
    eval_batches: int
    offload_dir: str | None
    max_minutes: float | None
    grace_s: float
    elastic: bool
    max_restarts: int
    deterministic: bool
    matmul: str


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """What is watched while the run goes on; None and 0 watch nothing."""

    nonfinite: str
    spike: float | None
    on_spike: str
    replicas_every: int
    straggler: float | None
    slow_link: float | None
    silence_s: float
    heartbeat_s: float


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Low-rank adapters as written; ``kind`` "none" means that the model itself trains."""

    kind: Literal["none", "lora", "qlora"]
    rank: int
    alpha: float | None
    targets: tuple[str, ...]
    levels: Literal["nf4", "fp4"]
    double: bool

    def spec(self) -> AdapterSpec | None:
        """Return the adapter, or None."""
        if self.kind == "none":
            return None
        return make_adapter(self.kind, self.rank, self.alpha, self.targets, self.levels, self.double)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Steps to trace."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """Everything a run needs, as values.

    Attributes:
        layout_text: layout text, or "auto" where the planner still has to choose.
        source: the run file.
        origins: for every dotted key "default", "file:LINE", "--set" or "option --layout".
        found_in: for every path, against which folder it was taken.
        warnings: settings that have no effect (W101).
    """

    model: ModelSettings
    data: DataSettings
    batch: BatchSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    clip: ClipSettings
    layout_text: str
    run: RunSettings
    guards: GuardSettings
    adapter: AdapterSettings
    profile: ProfileSettings
    freeze: tuple[str, ...]
    cluster: str | None
    source: str
    origins: Mapping[str, str]
    found_in: Mapping[str, str] = field(default_factory=dict[str, str])
    warnings: tuple[Problem, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by section, as ``run.json`` keeps them (without origins)."""
        return {
            "model": asdict(self.model),
            "data": {**asdict(self.data), "sources": dict(self.data.sources) or None},
            "batch": asdict(self.batch),
            "optimizer": {**asdict(self.optimizer), "betas": list(self.optimizer.betas)},
            "schedule": asdict(self.schedule),
            "clip": asdict(self.clip),
            "layout": self.layout_text,
            "run": asdict(self.run),
            "guards": asdict(self.guards),
            "adapter": {**asdict(self.adapter), "targets": list(self.adapter.targets)},
            "profile": asdict(self.profile),
            "cluster": self.cluster,
            "freeze": list(self.freeze),
        }

    def flat(self) -> dict[str, Any]:
        """Return the settings by dotted key, in the order of the run file."""
        out: dict[str, Any] = {}
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                out.update({f"{name}.{key}": held for key, held in value.items()})  # pyright: ignore[reportUnknownVariableType]
            else:
                out[name] = value
        return out

    def with_layout(self, text: str, origin: str) -> ResolvedRun:
        """Return this run with another layout text and where that came from."""
        return replace(self, layout_text=text, origins={**self.origins, "layout": origin})


def resolve(
    loaded: LoadedRun,
    layout: str | None = None,
    folder: Path | None = None,
    check_batch: bool = True,
    overridden: Collection[str] = (),
) -> ResolvedRun:
    """Return the run as values; ``layout`` is the command line's, which comes before the file's.

    Relative paths to read (model, weights, data, tokenizer, cluster) are looked for in the run file's folder
    first and then in ``folder`` (by default the current one); ``run.dir`` is always taken from the current
    folder. ``check_batch=False`` leaves the batch arithmetic out, for a proof has its own batch. What the command line
    says in place of the file ("layout" in a plan) is named in ``overridden``, and not judged here.

    Raises:
        MeshwrightError: E108 for settings that contradict each other, E901 for settings not honoured yet, and
            whatever is wrong with the layout text, all at once.
    """
    w = loaded.written
    origins = dict(loaded.origins)
    found_in: dict[str, str] = {}

    def path(key: str, text: str | None) -> str | None:
        if text is None:
            return None
        shown, place = _locate(text, loaded.source.parent, folder or Path())
        found_in[key] = place
        return shown

    config = path("model.config", w.model.config)
    data_path = w.data.path if w.data.path == PYTHON_DOCS else path("data.path", w.data.path)
    sources: list[tuple[str, float]] = []
    for source, weight in (w.data.sources or {}).items():
        place = source if source == PYTHON_DOCS else path(f"data.sources.{source}", source)
        sources.append((place or source, weight))
    assert config is not None  # required by the schema
    if layout is not None:
        origins["layout"] = "option --layout"
    found_in["run.dir"] = "the current folder"
    run = ResolvedRun(
        model=ModelSettings(config=config, weights=path("model.weights", w.model.weights)),
        data=DataSettings(
            path=data_path,
            tokenizer=path("data.tokenizer", w.data.tokenizer),
            seq_len=w.data.seq_len,
            text_field=w.data.text_field,
            eval_fraction=w.data.eval_fraction,
            sources=tuple(sources),
            format=w.data.format,
            chat_template=path("data.chat_template", w.data.chat_template),
            rows=w.data.rows,
            too_long=w.data.too_long,
            epochs=w.data.epochs,
        ),
        batch=BatchSettings(sequences=w.batch.sequences, accumulation=w.batch.accumulation),
        optimizer=OptimizerSettings(
            name=w.optimizer.name,
            lr=w.optimizer.lr,
            weight_decay=w.optimizer.weight_decay,
            betas=(w.optimizer.betas[0], w.optimizer.betas[1]),
            eps=w.optimizer.eps,
            momentum=w.optimizer.momentum,
        ),
        schedule=ScheduleSettings(
            name=w.schedule.name,
            warmup_steps=w.schedule.warmup_steps,
            min_lr_ratio=w.schedule.min_lr_ratio,
        ),
        clip=ClipSettings(max_norm=w.clip.max_norm),
        layout_text=w.layout if layout is None else layout,
        run=RunSettings(
            dir=w.run.dir or f"runs/{loaded.source.stem}",
            steps=w.run.steps,
            seed=w.run.seed,
            checkpoint_every=w.run.checkpoint_every,
            checkpoint_async=w.run.checkpoint_async,
            keep_last=w.run.keep_last,
            keep_every=w.run.keep_every,
            keep_best=w.run.keep_best,
            eval_every=w.run.eval_every,
            eval_batches=w.run.eval_batches,
            offload_dir=w.run.offload_dir,
            max_minutes=w.run.max_minutes,
            grace_s=w.run.grace_s,
            elastic=w.run.elastic,
            max_restarts=w.run.max_restarts,
            deterministic=w.run.deterministic,
            matmul=w.run.matmul,
        ),
        guards=GuardSettings(**w.guards.model_dump()),
        adapter=AdapterSettings(
            kind=w.adapter.kind,
            rank=w.adapter.rank,
            alpha=w.adapter.alpha,
            targets=tuple(w.adapter.targets),
            levels=w.adapter.levels,
            double=w.adapter.double,
        ),
        profile=ProfileSettings(steps=w.profile.steps),
        freeze=tuple(w.freeze),
        cluster=path("cluster", w.cluster),
        source=str(loaded.source),
        origins=origins,
        found_in=found_in,
    )
    refuse(
        [
            *_not_honoured(run),
            *_no_source(run),
            *_contradictions(run),
            *(
                []
                if "layout" in overridden
                else [*_accumulation_problems(run), *_layout_problems(run, check_batch)]
            ),
        ]
    )
    return replace(run, warnings=tuple(_without_effect(run)))


def _locate(text: str, beside: Path, current: Path) -> tuple[str, str]:
    """Return a path that works from here and the folder it was taken from."""
    given = Path(text).expanduser()
    if given.is_absolute():
        return str(given), "an absolute path"
    if (beside / given).exists():
        return str(beside / given), "the run file's folder"
    if (current / given).exists():
        return str(current / given), "the current folder"
    return text, "as written"


def _where(run: ResolvedRun, key: str) -> str:
    """Return the key and, for people, where its value stands."""
    origin = run.origins[key]
    return f"{key} ({origin.replace('file', Path(run.source).name, 1)})"


def _no_source(run: ResolvedRun) -> list[Problem]:
    """Return E640 unless the run has either one path or several sources."""
    if (run.data.path is None) != (not run.data.sources):
        return []
    found = (
        "neither data.path nor data.sources" if run.data.path is None else "both data.path and data.sources"
    )
    return [problem("E640", where=_where(run, "data.path"), found=found)]


def _not_honoured(run: ResolvedRun) -> list[Problem]:
    flat = run.flat()
    return [
        problem(
            "E901", where=_where(run, key), found=f"{key} = {shown(flat[key])}", needs=shown(default), do=do
        )
        for key, (default, do) in NOT_HONOURED.items()
        if flat[key] != default
    ]


def _contradictions(run: ResolvedRun) -> list[Problem]:
    problems: list[Problem] = []
    if run.run.eval_every and not run.data.eval_fraction:
        problems.append(
            problem(
                "E108",
                where=f"{_where(run, 'run.eval_every')}, {_where(run, 'data.eval_fraction')}",
                found=f"run.eval_every = {run.run.eval_every} and data.eval_fraction = 0",
                why="there is no held-out text to evaluate on",
                do="set data.eval_fraction (for instance 0.02), or run.eval_every = 0",
            )
        )
    if run.run.keep_best and not run.data.eval_fraction:
        problems.append(
            problem(
                "E108",
                where=f"{_where(run, 'run.keep_best')}, {_where(run, 'data.eval_fraction')}",
                found="run.keep_best = true and data.eval_fraction = 0",
                why="the best checkpoint is that of the lowest held-out loss, and there is no held-out text",
                do="set data.eval_fraction (for instance 0.02), or run.keep_best = false",
            )
        )
    return problems


def _accumulation_problems(run: ResolvedRun) -> list[Problem]:
    stated = run.batch.accumulation
    if stated is None or run.layout_text != "auto":
        return []
    return [
        problem(
            "E108",
            where=f"{_where(run, 'batch.accumulation')}, {_where(run, 'layout')}",
            found=f"batch.accumulation = {stated} and layout = auto",
            why="the planner chooses dp and micro_batch, and accumulation follows from them",
            do="remove batch.accumulation, or write the layout out",
        )
    ]


def _layout_problems(run: ResolvedRun, check_batch: bool) -> list[Problem]:
    """Return what is wrong with the layout text, its batch and a stated accumulation."""
    if run.layout_text == "auto":
        return []
    try:
        layout = parse_layout(run.layout_text)
    except MeshwrightError as error:
        return [_said(run, p) for p in error.problems]
    if not check_batch:
        return []
    stated = run.batch.accumulation
    derived = run.batch.sequences / (layout.dp * layout.micro_batch)
    if stated is not None and stated != derived:
        return [
            problem(
                "E108",
                where=f"{_where(run, 'batch.accumulation')}, {_where(run, 'layout')}",
                found=f"batch.accumulation = {stated}, but batch.sequences = {run.batch.sequences} and "
                f'layout = "{run.layout_text}" make {derived:g}',
                needs="batch.accumulation == batch.sequences / (dp * micro_batch)",
                do=f"remove batch.accumulation, or set batch.sequences = "
                f"{stated * layout.dp * layout.micro_batch}",
            )
        ]
    try:
        derive_batch(layout, run.batch.sequences, run.data.seq_len)
    except MeshwrightError as error:
        return [_said(run, p) for p in error.problems]
    return []


def _said(run: ResolvedRun, found: Problem) -> Problem:
    """Return a Problem of the layout text with the place where that text stands."""
    place = _where(run, "layout").removeprefix("layout ")
    return replace(found, where=f"{found.where or 'layout'} {place}")


def _idle_data(data: DataSettings) -> list[tuple[str, str]]:
    """Return the keys that documents of this form, as far as the run file says it, leave unread, each with the reason.

    Where the form follows from the first record, every key may have an effect.
    """
    docs = data.path == PYTHON_DOCS and not data.sources
    form, why = (
        ("text", f"{PYTHON_DOCS} is plain text") if docs else (data.format, f"data.format = {data.format}")
    )
    idle: list[tuple[str, str]] = []
    if form in ("text", "completion"):
        idle.append(("data.chat_template", f"{why}: there are no conversations to write"))
    if docs or form in ("chat", "completion"):
        idle.append(("data.text_field", f"{why}: no field of that name is read"))
    if (data.rows or ("stream" if form == "text" else None)) == "stream":
        idle.append(
            ("data.too_long", "documents run on in a stream, whatever their length (data.rows pack and pad)")
        )
    return idle


def _without_effect(run: ResolvedRun) -> list[Problem]:
    """Return W101 for each setting that was written and that nothing will read."""
    idle: list[tuple[str, str]] = []
    if run.optimizer.name == "adamw":
        idle.append(("optimizer.momentum", "optimizer.name = adamw uses betas"))
    else:
        idle += [(f"optimizer.{key}", "optimizer.name = sgd uses momentum") for key in ("betas", "eps")]
    if run.schedule.name == "constant":
        idle.append(("schedule.min_lr_ratio", "schedule.name = constant does not decay"))
    if not run.data.eval_fraction:
        idle.append(("run.eval_batches", "data.eval_fraction = 0 holds no text out"))
    if run.run.keep_last is None:
        idle += [
            (f"run.{key}", "run.keep_last = null keeps every checkpoint")
            for key in ("keep_every", "keep_best")
        ]
    if not run.run.elastic:
        idle.append(("run.max_restarts", "run.elastic = false starts nothing again by itself"))
    if run.guards.spike is None:
        idle.append(("guards.on_spike", "guards.spike = null looks for none"))
    if run.adapter.kind == "none":
        idle += [(f"adapter.{key}", "adapter.kind = none") for key in ("rank", "alpha", "targets")]
    if run.adapter.kind != "qlora":
        why = f"adapter.kind = {run.adapter.kind} leaves the base as it is"
        idle += [(f"adapter.{key}", why) for key in ("levels", "double")]
    idle += _idle_data(run.data)
    flat = run.flat()
    problems = [
        problem("W101", where=_where(run, key), found=f"{key} = {shown(flat[key])} has no effect", why=why)
        for key, why in idle
        if run.origins[key] != "default"
    ]
    if run.schedule.warmup_steps > run.run.steps:
        found = f"run.steps = {run.run.steps} ends before schedule.warmup_steps = {run.schedule.warmup_steps}"
        why = "the learning rate never reaches optimizer.lr, and the decay never starts"
        problems.append(problem("W101", where=_where(run, "schedule.warmup_steps"), found=found, why=why))
    return problems
