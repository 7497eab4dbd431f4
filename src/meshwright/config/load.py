"""Reading a run file and its ``--set`` overrides: every mistake in it is reported at once, with its line."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import ValidationError

from meshwright.base.errors import MeshwrightError, Problem, nearest, problem, refuse
from meshwright.config.schema import RunFile, known_keys, sections
from meshwright.config.text import Parsed, parse, scalar

_SUFFIXES = (".yaml", ".yml", ".json", ".toml")

_ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "optim": "optimizer.name",
    "adam_epsilon": "optimizer.eps",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "num_warmup_steps": "schedule.warmup_steps",
    "lr_warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_steps",
    "min_lr": "schedule.min_lr_ratio",
    "gradient_accumulation_steps": "batch.accumulation",
    "accumulation_steps": "batch.accumulation",
    "gradient_accumulation": "batch.accumulation",
    "max_grad_norm": "clip.max_norm",
    "gradient_clipping": "clip.max_norm",
    "clip_grad": "clip.max_norm",
    "batch_size": "batch.sequences",
    "global_batch": "batch.sequences",
    "global_batch_size": "batch.sequences",
    "train_batch_size": "batch.sequences",
    "per_device_train_batch_size": "layout (micro_batch=...)",
    "micro_batch_size": "layout (micro_batch=...)",
    "micro_batch": "layout (micro_batch=...)",
    "num_train_epochs": "data.epochs",
    "epochs": "data.epochs",
    "packing": "data.rows",
    "sample_packing": "data.rows",
    "datasets": "data.sources",
    "max_steps": "run.steps",
    "train_steps": "run.steps",
    "output_dir": "run.dir",
    "save_steps": "run.checkpoint_every",
    "save_every": "run.checkpoint_every",
    "eval_steps": "run.eval_every",
    "random_seed": "run.seed",
    "max_seq_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "block_size": "data.seq_len",
    "dataset": "data.path",
    "train_file": "data.path",
    "model_name_or_path": "model.config",
    "bf16": "layout (precision=bf16)",
    "fp16": "layout (precision=fp16)",
    "precision": "layout (precision=...)",
    "mixed_precision": "layout (precision=...)",
    "dtype": "layout (precision=...)",
    "gradient_checkpointing": "layout (recompute=...)",
    "activation_checkpointing": "layout (recompute=...)",
    "recompute": "layout (recompute=...)",
    "zero": "layout (zero=...)",
    "zero_stage": "layout (zero=...)",
    "fsdp": "layout (zero=3)",
    "dp": "layout (dp=...)",
    "tp": "layout (tp=...)",
    "pp": "layout (pp=...)",
    "tensor_parallel_size": "layout (tp=...)",
    "pipeline_parallel_size": "layout (pp=...)",
}
"""Where settings that other programs name differently live here."""


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run file that is well written, with the origin of every value.

    Attributes:
        written: its content.
        source: the file it came from.
        origins: for every dotted key "default", "file:LINE" or "--set".
    """

    written: RunFile
    source: Path
    origins: Mapping[str, str]


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Return the run file at ``path`` with the ``section.field=value`` overrides applied.

    Raises:
        MeshwrightError: E100-E107 and E109, all at once.
    """
    source = Path(path)
    parsed = parse(_read(source), source.suffix.lower(), source.name)
    problems = list(parsed.problems)
    if parsed.value is None and problems:
        raise MeshwrightError(problems)
    content: Any = parsed.value
    if not isinstance(content, dict):
        raise MeshwrightError([*problems, _not_a_mapping(content, source)])
    raw = cast("dict[str, Any]", content)
    before = len(problems)
    overridden = _apply(raw, overrides, problems)
    # An override that cannot be read leaves a hole in the file that must not be reported as a second mistake.
    skipped = {_key_of(text) for text in overrides} if len(problems) > before else set[str]()
    written: RunFile | None = None
    try:
        written = RunFile.model_validate(raw)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            found = _problem_of(cast("Mapping[str, Any]", item), parsed, source.name, overridden, raw)
            if found.code != "E107" or found.where.split(" ", 1)[0] not in skipped:
                problems.append(found)
    problems += [
        problem(
            "E106",
            where=_place(dotted, parsed, source.name, overridden)[1],
            found=f"is the text {text!r}, with a NUL character",
            needs="text without NUL characters",
        )
        for dotted, text in _texts("", raw)
        if "\0" in text
    ]
    refuse(problems)
    assert written is not None  # no problems, so it was built
    return LoadedRun(written=written, source=source, origins=_origins(raw, parsed, overridden))


def _texts(dotted: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every text below ``value`` with the dotted key that it stands at."""
    if isinstance(value, str):
        yield dotted, value
    elif isinstance(value, dict):
        for key, inner in cast("dict[Any, Any]", value).items():
            yield from _texts(f"{dotted}.{key}" if dotted else str(key), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(cast("list[Any]", value)):
            yield from _texts(f"{dotted}.{number}", inner)


def _read(source: Path) -> str:
    where = str(source)
    if source.is_dir():
        raise MeshwrightError(problem("E100", where=where, found="is a folder, not a run file"))
    try:
        return source.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        beside = nearest(
            source.name, (p.name for p in source.parent.glob("*.*")) if source.parent.is_dir() else ()
        )
        do = f"did you mean {', '.join(str(source.parent / name) for name in beside)}?" if beside else ""
        raise MeshwrightError(problem("E100", where=where, found="there is no such file", do=do)) from None
    except UnicodeDecodeError as error:
        found = f"is not UTF-8 text (byte {error.start})"
        raise MeshwrightError(problem("E100", where=where, found=found)) from None
    except OSError as error:
        raise MeshwrightError(problem("E100", where=where, found=error.strerror or str(error))) from None


def _not_a_mapping(value: Any, source: Path) -> Problem:
    found = "the file is empty" if value is None else f"the top level is {_kind(value)}"
    return problem("E102", where=str(source), found=found)


def _key_of(text: str) -> str:
    return text.split("=", 1)[0].strip()


def _apply(raw: dict[str, Any], overrides: Sequence[str], problems: list[Problem]) -> set[str]:
    """Write the overrides into ``raw``; return the keys they set."""
    done: set[str] = set()
    keys = known_keys()
    parts = sections()
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        where = f"--set {text}"
        if not equals or not key:
            problems.append(problem("E109", where=where, found="there is no key=value"))
            continue
        if key in parts:
            shown = ", ".join(f"{key}.{name}" for name in parts[key].model_fields)
            problems.append(
                problem("E109", where=where, found=f"{key} is a section", needs=f"one of {shown}")
            )
            continue
        if key not in keys:
            problems.append(_unknown(key, f"--set {key}"))
            continue
        if key in done:
            problems.append(problem("E109", where=where, found=f"{key} is set twice", do="give it once"))
            continue
        section, _, field = key.rpartition(".")
        target: Any = raw
        if section:
            if raw.get(section) is None:
                raw[section] = {}
            target = raw[section]
        if not isinstance(target, dict):
            continue  # the section itself is wrong in the file, which is reported there
        done.add(key)
        annotation = (parts[section] if section else RunFile).model_fields[field].annotation
        target[field] = _typed(value, annotation, where, problems)
    return done


def _typed(text: str, annotation: Any, where: str, problems: list[Problem]) -> Any:
    """Return the override's value in the form that the schema's type wants."""
    kinds = _plain_types(annotation)
    if str in kinds and list not in kinds:
        return None if text == "null" and type(None) in kinds else text
    if list in kinds or text[:1] in "[{'\"":
        parsed = parse(text, ".yaml", where)
        problems.extend(problem("E109", where=where, found=p.found) for p in parsed.problems)
        return parsed.value
    return scalar(text.strip())


def _plain_types(annotation: Any) -> set[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain_types(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _plain_types(part)}
    if origin is Literal:
        return {str}
    return {origin or annotation}


def _kind(value: Any) -> str:
    """Return what a value is, in words."""
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return f"the switch {str(value).lower()}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, int | float):
        return f"the number {value!r}"
    if isinstance(value, list):
        return f"a list of {len(cast('list[Any]', value))}"
    if isinstance(value, dict):
        return "a mapping"
    return f"a {type(value).__name__}"


def _unknown(dotted: str, where: str) -> Problem:
    """Return E104 with the keys that the unknown one may have meant."""
    section, _, leaf = dotted.rpartition(".")
    keys = known_keys()
    parts = sections()
    guesses: dict[str, str] = {}
    elsewhere = leaf if leaf in _ELSEWHERE else next(iter(nearest(leaf, _ELSEWHERE, 1)), "")
    if section in parts:
        guesses.update({f"{section}.{name}": "" for name in nearest(leaf, parts[section].model_fields)})
    if elsewhere:
        there = {_ELSEWHERE[elsewhere]: elsewhere}
        guesses = (
            there | guesses if elsewhere == leaf else guesses | there
        )  # a near miss of the section's own comes first
    leaves = {key.rpartition(".")[2]: key for key in keys} | {name: name for name in parts}
    if not guesses:
        guesses = {leaves[name]: "" for name in nearest(leaf, leaves, 2)}
    shown = [f"{there} (here {here})" if there else here for here, there in guesses.items()][:3]
    if shown:
        do = f"did you mean {' or '.join(shown)}?"
    elif section in parts:
        do = f"the keys of {section} are {', '.join(parts[section].model_fields)}"
    else:
        do = f"the sections are {', '.join(RunFile.model_fields)}"
    return problem("E104", where=where, found=f"unknown key {dotted!r}", do=do)


def _place(dotted: str, parsed: Parsed, source: str, overridden: set[str]) -> tuple[str, str]:
    """Return the setting that ``dotted`` is or is inside of, and where its value was written."""
    loc = dotted.split(".")
    line = parsed.lines.get(dotted) or next(
        (
            parsed.lines[".".join(loc[:n])]
            for n in range(len(loc), 0, -1)
            if ".".join(loc[:n]) in parsed.lines
        ),
        None,
    )
    setting = ".".join(loc[:2]) if ".".join(loc[:2]) in overridden else dotted
    if setting in overridden:
        return setting, f"{dotted} (--set)"
    return setting, f"{dotted} ({source}:{line})" if line else f"{dotted} ({source})"


def _problem_of(
    item: Mapping[str, Any], parsed: Parsed, source: str, overridden: set[str], raw: Mapping[str, Any]
) -> Problem:
    """Return the Problem for one of pydantic's errors."""
    dotted = ".".join(str(part) for part in item["loc"])
    kind = str(item["type"])
    setting, where = _place(dotted, parsed, source, overridden)
    if kind == "extra_forbidden":
        return _unknown(dotted, where)
    if kind == "missing":
        found = "the section is missing" if dotted in sections() else "the key is missing"
        return problem("E107", where=where, found=found, needs=_described(dotted))
    value = item["input"]
    needs = str(item["msg"]).removeprefix("Input should be ")
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(sections()[dotted].model_fields) if dotted in sections() else ""
        needs = f"a mapping with some of the keys {keys}"
        do = "write keys below it, or remove it" if value is None else "indent its keys below it"
        return problem("E105", where=where, found=f"the section is {_kind(value)}", needs=needs, do=do)
    found = f"is {_kind(value)}"
    if kind.endswith(("_type", "_parsing")) or kind == "int_from_float":
        return problem("E105", where=where, found=found, needs=needs, do=_type_advice(value, kind, setting))
    if kind in ("too_short", "too_long"):
        needs = str(item["msg"])
    do = ""
    if kind == "literal_error" and isinstance(value, str):
        choices = re.findall(r"'([^']+)'", needs)
        close = nearest(value, choices, 1)
        do = "write auto only for layout; this is a value" if value == "auto" else ""
        do = f"did you mean {close[0]}?" if close else do
    return problem(
        "E106", where=where, found=found, needs=needs, do=do or f"{setting}: {_described(setting)}"
    )


def _described(dotted: str) -> str:
    """Return the schema's description of a key (or of a section's keys)."""
    section, _, leaf = dotted.rpartition(".")
    parts = sections()
    if dotted in parts:
        return f"a section with the keys {', '.join(parts[dotted].model_fields)}"
    fields = parts[section].model_fields if section in parts else RunFile.model_fields
    return (fields[leaf].description or "") if leaf in fields else ""


def _type_advice(value: Any, kind: str, setting: str) -> str:
    """Return how to write what was probably meant."""
    if isinstance(value, str):
        if value == "auto":
            return f"only layout may be auto; write a value ({_described(setting)})"
        if kind.startswith("bool") and value.lower() in ("yes", "no", "on", "off", "y", "n", "0", "1"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'y', '1') else 'false'}"
        if re.fullmatch(r"[-+]?0[0-9]+", value):
            return f"write it without leading zeros: {int(value)}"
        if isinstance(scalar(value), int | float):
            return f"write it without quotes: {value}"
    if isinstance(value, bool) and kind.startswith("string"):
        return 'write it in quotes, for instance "true"'
    if isinstance(value, int | float) and kind.startswith("string"):
        return f'write it in quotes: "{value}"'
    if value is None:
        return "write a value, or remove the key to have its default"
    if kind.startswith("list"):
        return f"write a list: [{value}]"
    return f"{setting}: {_described(setting)}"


def _origins(raw: Mapping[str, Any], parsed: Parsed, overridden: set[str]) -> dict[str, str]:
    """Return where each known key's value came from."""
    out: dict[str, str] = {}
    for key in known_keys():
        section, _, leaf = key.rpartition(".")
        held: Any = raw.get(section, {}) if section else raw
        if key in overridden:
            out[key] = "--set"
        elif isinstance(held, dict) and leaf in held:
            line = parsed.lines.get(key)
            out[key] = f"file:{line}" if line else "file"
        else:
            out[key] = "default"
    return out
