"""The run file as people write it: sections, types and ranges. Keys that are not here are refused.

Field descriptions are the reference: ``meshwright config schema`` and the template of ``meshwright init``
are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from meshwright.layout.batch import MOST_SEQUENCES, MOST_TOKENS
from meshwright.model.adapters import MOST_RANK

MOST_STEPS = 2**31
MOST_SEED = 2**63 - 1
"""What the random number generators take."""

Share: TypeAlias = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive: TypeAlias = Annotated[float, Field(gt=0.0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0.0)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MOST_STEPS)]
CountOrOff: TypeAlias = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Seed: TypeAlias = Annotated[int, Field(ge=0, le=MOST_SEED)]
Name: TypeAlias = Annotated[str, Field(min_length=1)]


NOT_HONOURED: Mapping[str, tuple[Any, str]] = {
    "profile.steps": (0, "remove it: times by phase are in metrics.jsonl of every run"),
}
"""Keys of which only the default is honoured today, and what works instead."""


class Section(BaseModel):
    """A section: no unknown keys, no silent conversions, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """What is trained."""

    config: Name = Field(
        description="a folder with a Hugging Face config.json, such a file, or a name from `meshwright models`"
    )
    weights: Name | None = Field(
        default=None,
        description="folder or file with pretrained weights; null = fresh weights drawn from run.seed",
    )


class DataSection(Section):
    """What it is trained on."""

    path: Name | None = Field(
        default=None,
        description="a text file, a folder, JSONL, a Hugging Face dataset folder, a folder by `meshwright data build`, "
        "or python-docs (comes with Python); null = data.sources",
    )
    sources: dict[Name, Positive] | None = Field(
        default=None,
        description="several paths with their weights, such as {a.jsonl: 3, b: 1}: shares of the sequences",
    )
    tokenizer: Name | None = Field(
        default=None,
        description="a tokenizer.json or a folder with one; null = that of documents built before, else a byte-level "
        "BPE trained on the corpus and cached",
    )
    seq_len: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = Field(description="tokens per sequence")
    format: Literal["text", "chat", "completion"] | None = Field(
        default=None,
        description="what records are: text_field, messages, or prompt and completion; null = by the first record",
    )
    text_field: Name = Field(
        default="text", description="the field that holds the text in JSONL and datasets"
    )
    chat_template: Name | None = Field(
        default=None, description="a Jinja file that writes conversations; null = the tokenizer's"
    )
    rows: Literal["stream", "pack", "pad"] | None = Field(
        default=None,
        description="how documents fill sequences: run on (stream), several that do not see each other (pack), or one "
        "each (pad); null = stream for text, else pack",
    )
    too_long: Literal["refuse", "split", "truncate", "skip"] | None = Field(
        default=None,
        description="a document longer than seq_len, with pack and pad; null = split for text, else refuse",
    )
    eval_fraction: Share = Field(
        default=0.02, description="share of the text held out for evaluation; 0 = none"
    )
    epochs: Count | None = Field(
        default=None, description="end after so many passes over the data; null = repeat until run.steps"
    )


class BatchSection(Section):
    """How much goes into one optimizer step."""

    sequences: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] = Field(
        description="sequences per optimizer step over the whole job; accumulation follows from the layout"
    )
    accumulation: Count | None = Field(
        default=None,
        description="only checked: must equal sequences / (dp * micro_batch) of the layout; null = derived",
    )


class OptimizerSection(Section):
    """How weights are updated."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="adamw or sgd")
    lr: Positive = Field(default=3e-4, description="peak learning rate")
    weight_decay: NotNegative = Field(default=0.1, description="decay of matrices (not of norms and biases)")
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.95], description="adamw's two averages"
    )
    eps: Positive = Field(default=1e-8, description="adamw's denominator term")
    momentum: Share = Field(default=0.0, description="sgd's momentum")


class ScheduleSection(Section):
    """The learning rate over the steps."""

    name: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="cosine, linear or constant after the warm-up"
    )
    warmup_steps: CountOrOff = Field(default=0, description="steps of linear warm-up")
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.1, description="last learning rate as a share of optimizer.lr"
    )


class ClipSection(Section):
    """Gradient clipping by the norm over all logical parameters."""

    max_norm: Positive | None = Field(default=1.0, description="largest gradient norm; null = no clipping")


class RunSection(Section):
    """The run itself."""

    dir: Name | None = Field(
        default=None, description="run folder, from the current folder; null = runs/NAME-OF-THE-RUN-FILE"
    )
    steps: Count = Field(description="optimizer steps; also the horizon of the learning-rate schedule")
    seed: Seed = Field(default=0, description="seed of weights, data order and dropout")
    checkpoint_every: CountOrOff = Field(
        default=0, description="steps between checkpoints; 0 = only at the end"
    )
    checkpoint_async: bool = Field(
        default=True, description="write checkpoints beside the training; steps wait only for the copy"
    )
    keep_last: Count | None = Field(
        default=None, description="newest checkpoints to keep; null = all of them"
    )
    keep_every: CountOrOff = Field(
        default=0, description="with keep_last: also keep steps that are multiples of it; 0 = none"
    )
    keep_best: bool = Field(
        default=False, description="with keep_last: also keep the checkpoint of the lowest held-out loss"
    )
    eval_every: CountOrOff = Field(default=0, description="steps between evaluations; 0 = only at the end")
    eval_batches: Count = Field(default=4, description="global batches of held-out text per evaluation")
    offload_dir: Name | None = Field(
        default=None,
        description="folder for layouts with offload=...-nvme, best on a local disk; null = RUN_DIR/offload",
    )
    max_minutes: Positive | None = Field(
        default=None, description="stop in good order after this many minutes; null = never"
    )
    grace_s: Positive = Field(
        default=25.0,
        description="seconds that a run has to save and end after SIGTERM; then its ranks are killed",
    )
    elastic: bool = Field(
        default=False,
        description="after a lost rank go on from the newest checkpoint by itself, with fewer ranks in a smaller layout",
    )
    max_restarts: CountOrOff = Field(
        default=3,
        description="with elastic: how often the run may start again by itself (under torchrun: --max-restarts)",
    )
    deterministic: bool = Field(
        default=False, description="only algorithms that repeat bit for bit; run.json names the settings"
    )
    matmul: Literal["machine", "torch"] = Field(
        default="machine",
        description="who multiplies float32 matrices on a CPU: oneDNN where torch's own library leaves the processor's "
        "widest instructions unused (machine), or that library everywhere (torch)",
    )


class GuardsSection(Section):
    """What is watched while the run goes on."""

    nonfinite: Literal["skip", "stop"] = Field(
        default="skip",
        description="a loss or gradient that is NaN or infinite: skip the step, or stop the run",
    )
    spike: Annotated[float, Field(gt=1.0)] | None = Field(
        default=None,
        description="a loss above this many times the median of the last 20 is a spike; null = off",
    )
    on_spike: Literal["report", "stop"] = Field(default="report", description="what a spike does")
    replicas_every: CountOrOff = Field(
        default=0, description="steps between comparisons of the replicas' parameter hashes; 0 = never"
    )
    straggler: Annotated[float, Field(gt=1.0)] | None = Field(
        default=None, description="a rank this many times slower than the median rank is named; null = off"
    )
    slow_link: Annotated[float, Field(gt=1.0)] | None = Field(
        default=None,
        description="a link between ranks this many times slower than the best of its kind is named; null = off",
    )
    silence_s: NotNegative = Field(
        default=30.0,
        description="a rank that gives no sign for so many seconds is named and ends the run; 0 = wait",
    )
    heartbeat_s: NotNegative = Field(
        default=30.0,
        description="seconds between the signs of life of each rank (heartbeat/rank-N.json); 0 = none",
    )


class AdapterSection(Section):
    """Low-rank adapters (LoRA), which then are all that trains."""

    kind: Literal["none", "lora", "qlora"] = Field(
        default="none",
        description="none, lora, or qlora: the frozen matrices of the blocks in 4 bits (bitsandbytes)",
    )
    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] = Field(
        default=8, description="rank of the adapters' two factors"
    )
    alpha: Positive | None = Field(
        default=None, description="the adapters' product is scaled by alpha / rank; null = twice the rank"
    )
    targets: list[Name] = Field(
        default_factory=list,
        description="last parts of the names of the layers that get one (q_proj, experts); [] = attention and dense MLP",
    )
    levels: Literal["nf4", "fp4"] = Field(
        default="nf4",
        description="of kind qlora: the sixteen values of a weight, normal or floating-point ones",
    )
    double: bool = Field(
        default=True,
        description="of kind qlora: hold the scales of the blocks in 8 bits (4.13 bits a weight, not 4.5)",
    )


class ProfileSection(Section):
    """Traces of single steps."""

    steps: CountOrOff = Field(default=0, description="steps to trace; 0 = none")


class RunFile(Section):
    """A whole run file, as written and checked."""

    model: ModelSection
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    clip: ClipSection = ClipSection()
    layout: Name = Field(
        default="auto", description='layout text such as "dp=2,zero=3", or auto (the planner chooses)'
    )
    run: RunSection
    guards: GuardsSection = GuardsSection()
    adapter: AdapterSection = AdapterSection()
    profile: ProfileSection = ProfileSection()
    cluster: Name | None = Field(
        default=None,
        description="a name from `meshwright clusters` or a probe's JSON file, for predictions; null = this machine",
    )
    freeze: list[Name] = Field(
        default_factory=list, description="name patterns of parameters that do not train (model.embed*)"
    )


def sections() -> dict[str, type[Section]]:
    """Return the sections of the run file by name, in the order in which they are written."""
    found: dict[str, type[Section]] = {}
    for name, field in RunFile.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = field.annotation
    return found


def known_keys() -> tuple[str, ...]:
    """Return every dotted key of the run file ("optimizer.lr", "layout", ...)."""
    keys: list[str] = []
    parts = sections()
    for name in RunFile.model_fields:
        if name in parts:
            keys.extend(f"{name}.{key}" for key in parts[name].model_fields)
        else:
            keys.append(name)
    return tuple(keys)


def described_keys() -> list[tuple[str, str, str, str]]:
    """Return (dotted key, type, default, meaning) of every key; a required key has the default "required"."""
    parts = sections()
    rows: list[tuple[str, str, str, str]] = []
    for name, top in RunFile.model_fields.items():
        if name in parts:
            rows.extend(_described(f"{name}.{key}", info) for key, info in parts[name].model_fields.items())
        else:
            rows.append(_described(name, top))
    return rows


def _described(dotted: str, info: FieldInfo) -> tuple[str, str, str, str]:
    default = "required" if info.is_required() else shown(info.get_default(call_default_factory=True))
    meaning = info.description or ""
    if dotted in NOT_HONOURED:
        meaning += " (not honoured yet: only the default)"
    return dotted, _type_words(info.annotation), default, meaning


def shown(value: object) -> str:
    """Return a value as a run file writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _type_words(annotation: Any) -> str:
    """Return a type in the words of the run file: text, number, whole number, switch, list."""
    words: dict[Any, str] = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "switch",
        type(None): "null",
    }
    if annotation in words:
        return words[annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_words(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if origin is list:
        return f"list of {_type_words(get_args(annotation)[0])}"
    if origin is dict:
        return f"{_type_words(get_args(annotation)[1])} by path"
    return " | ".join(_type_words(part) for part in get_args(annotation))
