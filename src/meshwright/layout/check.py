"""The rules: what of a layout cannot be, what it pays, and what is not built yet.

Pure and cheap: the planner asks it for every candidate. Math rules refuse, cost rules warn with the numbers, code
rules (``check_built``) refuse what cannot run so far and say what can.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.base.errors import Problem, problem
from meshwright.base.units import format_bytes
from meshwright.cluster.spec import ClusterSpec
from meshwright.layout import built
from meshwright.layout.batch import Batch, check_actions
from meshwright.layout.check_context import context_built, padding
from meshwright.layout.check_offload import offload_built, precision_built
from meshwright.layout.check_quantised import quantised_built, quantised_cuts
from meshwright.layout.cut import check_cut
from meshwright.layout.layout import Layout
from meshwright.layout.precision import FP8, precision_table
from meshwright.layout.ranks import group, nodes_of
from meshwright.model.randomness import layout_dependent
from meshwright.model.sharding import BY_KV_HEAD, rule
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import SPLIT, check_chunks, check_micro_batches


def check(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch | None,
    cluster: ClusterSpec | None = None,
    *,
    for_run: bool = True,
    num_ranks: int | None = None,
) -> list[Problem]:
    """Return everything that is wrong with running ``spec`` under ``layout``; empty when nothing is.

    Args:
        spec: the model.
        layout: a parsed layout; its cut may still be "auto".
        batch: derived batch arithmetic, or None to leave the rules about batch and sequence out.
        cluster: where it is to run, or None to leave the rules about devices and nodes out.
        for_run: also say what is not built yet; the planner may price layouts that cannot run so far.
        num_ranks: ranks that there are; by default the cluster's devices.
    """
    problems = check_world(
        layout, num_ranks if num_ranks is not None or cluster is None else cluster.num_gpus
    )
    cut = _tensor(spec, layout)
    problems += cut
    problems += [] if any(p.severity == "error" for p in cut) else quantised_cuts(spec, layout)
    problems += _experts(spec, layout) + _grouped(spec, layout)
    if layout.world_size > 1:
        problems += [problem("W207", where="model.config", found=what) for what in layout_dependent(spec)]
    problems += check_cut(spec.num_layers, layout)
    problems += _zero(layout)
    problems += _pipeline(layout)
    if batch is not None:
        problems += _sequence(spec, layout, batch.seq_len)
        problems += _micro_batches(spec, layout, batch)
        problems += check_actions(layout, batch.accumulation)
    if layout.cp > 1:
        problems += _context_heads(spec, layout)
    if cluster is not None and layout.tp > 1:
        problems += _nodes(layout, cluster.gpus_per_node)
    if for_run:
        problems += check_built(layout, spec) + precision_built(layout)
    return problems


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_choices(legal: Sequence[int], wanted: int, count: int = 3) -> str:
    """Return up to ``count`` of the ``legal`` numbers nearest to ``wanted``, nearest first, as text."""
    return " | ".join(str(n) for n in sorted(legal, key=lambda n: (abs(n - wanted), n))[:count])


def check_world(layout: Layout, num_ranks: int | None) -> list[Problem]:
    """Return E215 when the layout's world size is not ``num_ranks``."""
    if num_ranks is None or layout.world_size == num_ranks:
        return []
    inner = layout.tp * layout.pp * layout.cp
    choices: list[str] = []
    if num_ranks % inner == 0:
        choices.append(f"dp = {num_ranks // inner}")
    for name in ("tp", "pp", "cp"):
        rest = layout.world_size // getattr(layout, name)
        if num_ranks % rest == 0 and getattr(layout, name) > 1:
            choices.append(f"{name} = {num_ranks // rest}")
    choices.append(f"{layout.world_size} ranks")
    return [
        problem(
            "E215",
            where="layout",
            found=f"dp * tp * pp * cp = {layout.dp} * {layout.tp} * {layout.pp} * {layout.cp} = "
            f"{layout.world_size} ranks, but there are {num_ranks}",
            do=" | ".join(choices),
        )
    ]


def _tensor(spec: ModelSpec, layout: Layout) -> list[Problem]:
    tp = layout.tp
    if tp == 1:
        if layout.sp:
            return [problem("E204", where="layout.sp", found="sp=on with tp = 1")]
        return []
    problems: list[Problem] = []
    heads, kv = spec.num_heads, spec.num_kv_heads
    if heads % tp:
        problems.append(
            problem(
                "E201",
                where="layout.tp",
                found=f'tp = {tp} does not divide the {heads} query heads of "{spec.name}"',
                do=f"tp = {nearest_choices(divisors(heads), tp)}",
            )
        )
    if spec.attention.kind == "gqa":
        problems += _kv_heads(kv, layout)
    widths = {b.ffn_size for b in spec.blocks if b.kind == "dense"}
    if spec.moe is not None:
        widths |= {spec.moe.ffn_size, spec.moe.shared_ffn_size}
    for width in sorted(w for w in widths if w and w % tp):
        problems.append(
            problem(
                "E203",
                where="layout.tp",
                found=f"tp = {tp} does not divide the feed-forward width {width}",
                do=f"tp = {nearest_choices(divisors(width), tp)}",
            )
        )
    if spec.vocab_size % tp:
        rows = -(-spec.vocab_size // tp)
        problems.append(
            problem(
                "W202",
                where="layout.tp",
                found=f"{spec.vocab_size} rows over tp = {tp}: {rows} on each rank, "
                f"{spec.vocab_size - rows * (tp - 1)} on the last",
            )
        )
    return problems


def _kv_heads(kv: int, layout: Layout) -> list[Problem]:
    tp = layout.tp
    legal = sorted({*divisors(kv), *(kv * n for n in range(2, max(3, tp // kv + 2)))})
    if kv % tp == 0:
        return []
    if tp % kv == 0:  # a plan writes kv_heads=replicate out (``cut.resolve``)
        return [
            problem(
                "W201",
                where="layout.kv_heads",
                found=f"{kv} key/value heads over tp = {tp}: each lives on {tp // kv} ranks (kv_heads=replicate)",
            )
        ]
    return [
        problem(
            "E202",
            where="layout.kv_heads",
            found=f"{kv} key/value heads cannot be split over tp = {tp} ",
            do=f"tp = {nearest_choices(legal, tp)}",
        )
    ]


def _experts(spec: ModelSpec, layout: Layout) -> list[Problem]:
    ep = layout.ep
    if ep == 1:
        return []
    problems: list[Problem] = []
    room = layout.dp * layout.cp
    if room % ep:
        problems.append(
            problem(
                "E208",
                where="layout.ep",
                found=f"ep = {ep} does not divide dp * cp = {layout.dp} * {layout.cp} = {room}",
                do=f"ep = {nearest_choices(divisors(room), ep)}",
            )
        )
    if spec.moe is None:
        problems.append(
            problem("E210", where="layout.ep", found=f'ep = {ep}, but "{spec.name}" has no experts')
        )
    elif spec.moe.num_experts % ep:
        experts = spec.moe.num_experts
        problems.append(
            problem(
                "E209",
                where="layout.ep",
                found=f"ep = {ep} does not divide the {experts} experts",
                do=f"ep = {nearest_choices(divisors(experts), ep)}",
            )
        )
    return problems


def _grouped(spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Return W265 when the experts of a mixture are multiplied one by one (float64 is for proofs: not said)."""
    if spec.moe is None or layout.precision == "fp64":
        return []
    size = precision_table(layout).bytes_of("compute")
    widths = {"hidden_size": spec.hidden_size, "width of an expert": spec.moe.ffn_size}
    odd = [f"{name} {n} x {size} bytes" for name, n in widths.items() if n * size % 16]
    if not odd:
        return []
    found = " and ".join(odd) + f" in {layout.precision} is no multiple of 16"
    return [problem("W265", where="model.config", found=found)]


def _zero(layout: Layout) -> list[Problem]:
    room, shard = layout.dp * layout.cp, layout.shard
    where = "layout.shard"
    if layout.zero == 0:
        if shard > 1:
            return [problem("E217", where=where, found=f"shard = {shard} with zero = 0")]
        return []
    if room == 1 and shard == 1:
        return [problem("W203", where="layout.zero", found=f"zero = {layout.zero} with dp * cp = 1")]
    if shard == 1:
        return [
            problem(
                "E214",
                where=where,
                found=f"shard = 1 with zero = {layout.zero} and dp * cp = {room}",
                do=f"zero = 0, or shard = {room}",
            )
        ]
    if room % shard or shard % layout.cp:
        legal = [d for d in divisors(room) if d % layout.cp == 0 and d > 1]
        return [
            problem(
                "E213",
                where=where,
                found=f"shard = {shard} with dp * cp = {layout.dp} * {layout.cp} = {room}",
                needs=f"shard divides {room}"
                + (f" and cp = {layout.cp} divides shard" if layout.cp > 1 else ""),
                do=f"shard = {nearest_choices(legal, shard)}" if legal else "zero = 0",
            )
        ]
    return []


def _pipeline(layout: Layout) -> list[Problem]:
    problems: list[Problem] = []
    if layout.zero == 3 and layout.schedule in SPLIT and layout.pp > 1:
        problems.append(
            problem("E216", where="layout.zero", found=f"zero = 3 with schedule={layout.schedule}")
        )
    problems += check_chunks(layout.schedule, layout.chunks)
    if layout.pp == 1 and layout.chunks > 1 and not problems:
        found = f"chunks = {layout.chunks} with schedule={layout.schedule} and pp = 1"
        do = "pp = 2 or more, or schedule=1f1b,chunks = 1"
        problems.append(problem("E223", where="layout.chunks", found=found, do=do))
    return problems


def _sequence(spec: ModelSpec, layout: Layout, seq_len: int) -> list[Problem]:
    problems: list[Problem] = []
    most = spec.max_position_embeddings
    if most and seq_len > most:
        learned = any(t.role == "position" for t in spec.embedding)
        problems.append(
            problem(
                "E219" if learned else "W219",
                where="seq_len",
                found=f'seq_len = {seq_len}, but "{spec.name}" was made for {most} positions',
                do=f"seq_len = {most} or less",
            )
        )
    problems += padding(layout, seq_len)
    tp = layout.tp
    if layout.cp == 1 and layout.sp and tp > 1 and seq_len % tp:
        problems.append(
            problem(
                "E205",
                where="layout.sp",
                found=f"seq_len = {seq_len} positions do not split over tp = {tp}",
                do=f"sp=off, or seq_len = {_multiples(seq_len, tp)}",
            )
        )
    return problems


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return " | ".join(str(n) for n in (below, below + unit) if n > 0)


def _context_heads(spec: ModelSpec, layout: Layout) -> list[Problem]:
    heads, tp, cp = spec.num_heads, layout.tp, layout.cp
    if layout.cp_style != "ulysses" or heads % tp:
        return []
    local = heads // tp
    if local % cp == 0:
        return []
    return [
        problem(
            "E207",
            where="layout.cp",
            found=f"{heads} query heads / tp = {tp} leaves {local} on a rank, which cp = {cp} does not divide",
            do=f"cp = {nearest_choices(divisors(local), cp)}, or cp_style=ring",
        )
    ]


def _micro_batches(spec: ModelSpec, layout: Layout, batch: Batch) -> list[Problem]:
    p, m = layout.pp, batch.accumulation
    if p == 1:
        return []
    problems = check_micro_batches(layout.schedule, p, m, batch.dp * batch.micro_batch)
    stages = layout.num_stages
    if m < stages:
        share = (p - 1) / (m * layout.chunks + p - 1)
        enough = stages * batch.dp * batch.micro_batch
        problems.append(
            problem(
                "W301",
                where="batch",
                found=f"{m} micro-batches over {stages} stages: ranks are idle for about {100 * share:.0f} % "
                f"of the step ((p-1)/(m+p-1) = {p - 1}/{m * layout.chunks + p - 1})",
                do=f"global batch = {enough} or more"
                + (f", or micro_batch below {layout.micro_batch}" if layout.micro_batch > 1 else ""),
            )
        )
    if layout.zero >= 2 and layout.shard > 1:
        problems.append(_zero_with_pipeline(spec, layout, m))
    return problems


def _zero_with_pipeline(spec: ModelSpec, layout: Layout, m: int) -> Problem:
    table = precision_table(layout)
    n = layout.shard
    share = (n - 1) / n / (layout.pp * layout.tp)
    reduced = spec.num_parameters * table.bytes_of("reduce") * share
    gathered = 2 * spec.num_parameters * table.bytes_of("gather") * share if layout.zero == 3 else 0.0
    once = spec.num_parameters * (table.bytes_of("reduce") + table.bytes_of("gather")) * share
    parts = f"{format_bytes(reduced)} of gradients"
    if gathered:
        parts += f" and {format_bytes(gathered)} of parameters"
    return problem(
        "W204",
        where="layout.zero",
        found=f"zero = {layout.zero} with pp = {layout.pp}: each rank sends about {parts} for each of {m} "
        f"micro-batches, {format_bytes((reduced + gathered) * m)} per step; zero = 1 sends {format_bytes(once)}",
    )


def _nodes(layout: Layout, gpus_per_node: int) -> list[Problem]:
    for rank in range(layout.world_size):
        members = group(layout, rank, "tp")
        if members[0] != rank:
            continue
        nodes = nodes_of(members, gpus_per_node)
        if len(nodes) > 1:
            legal = [t for t in divisors(gpus_per_node) if t <= layout.tp]
            fix = f"tp = {nearest_choices(legal, layout.tp)}"
            if layout.order[0] != "tp" and gpus_per_node % layout.tp == 0:
                fix = "order=tp/cp/dp/pp"
            return [
                problem(
                    "W206",
                    where="layout.tp",
                    found=f"tp group {list(members)[:8]}{'...' if len(members) > 8 else ''} spans nodes "
                    f"{', '.join(str(n) for n in nodes[:8])} ({gpus_per_node} devices a node)",
                    do=fix,
                )
            ]
        if layout.order[0] == "tp" and gpus_per_node % layout.tp == 0:
            return []
    return []


def check_built(layout: Layout, spec: ModelSpec | None = None) -> list[Problem]:
    """Return what of ``layout`` cannot run so far (kind "code"), each with what runs now; see ``layout.built``."""
    problems: list[Problem] = []
    for axis, instead in (("tp", "pp or zero=3"), ("cp", "dp or pp"), ("ep", "dp with zero=3")):
        degree = getattr(layout, axis)
        if degree > 1 and axis not in built.AXES:
            problems.append(
                problem(
                    "E250",
                    where=f"layout.{axis}",
                    found=f"{axis} = {degree} cannot run yet",
                    do=f"{axis} = 1; to spread over {degree} ranks use {instead}",
                )
            )
    for key, works in built.OPTIONS.items():
        value = getattr(layout, key)
        if value not in works and not (key == "schedule" and value.startswith("@")):
            if key == "schedule" and layout.pp == 1:
                continue  # no pipeline, nothing to schedule
            if key == "precision" and value in FP8:
                continue  # E291 says it
            problems.append(
                problem(
                    "E251",
                    where=f"layout.{key}",
                    found=f"{key}={value} cannot run yet",
                    needs=f"{key}={' | '.join(works)}",
                    do=f"{key}={'1f1b' if key == 'schedule' else works[0]}",
                )
            )
    if layout.loss == "parallel" and layout.tp == 1:
        problems.append(problem("E255", where="layout.loss", found="loss=parallel with tp = 1"))
    if spec is not None and layout.pp > 1 and spec.family not in built.PIPELINE_FAMILIES:
        problems.append(
            problem(
                "E252",
                where="layout.pp",
                found=f'pp = {layout.pp} with "{spec.name}" of family {spec.family}',
                needs="one of " + ", ".join(built.PIPELINE_FAMILIES) + ", or pp = 1",
                do=f"pp = 1,dp = {layout.dp * layout.pp}",
            )
        )
    if spec is not None and layout.tp > 1:
        problems += _tensor_built(spec, layout)
    if layout.ep > 1:
        problems += _experts_built(spec, layout)
    if spec is not None:
        problems += context_built(spec, layout) + quantised_built(spec, layout)
    problems += _compile_built(layout)
    problems += offload_built(layout)
    return problems


def _compile_built(layout: Layout) -> list[Problem]:
    """Return E279 for each option that compiled blocks do not go with."""
    if layout.compile == "off":
        return []
    beside: list[tuple[str, str]] = []
    if layout.recompute == "selective":
        beside.append(("recompute=selective", "recompute=full, or compile=off"))
    if layout.schedule in SPLIT and layout.pp > 1:
        whole = "interleaved" if layout.chunks > 1 else "1f1b"
        beside.append((f"schedule={layout.schedule}", f"schedule={whole}, or compile=off"))
    return [
        problem("E279", where="layout.compile", found=f"compile={layout.compile} with {what}", do=do)
        for what, do in beside
    ]


def _experts_built(spec: ModelSpec | None, layout: Layout) -> list[Problem]:
    """Return what of the expert axis cannot run so far."""
    ep, shard = layout.ep, layout.shard
    problems: list[Problem] = []
    if spec is not None and spec.moe is None:
        return problems  # E210 says it
    outside = layout.cp > 1 and layout.order.index("cp") > layout.order.index("dp")
    if layout.zero and shard > 1 and shard % ep and (ep % shard or outside):
        experts = spec.moe.num_experts if spec is not None and spec.moe is not None else shard
        legal = [d for d in divisors(layout.dp * layout.cp) if experts % d == 0]
        legal = [d for d in legal if shard % d == 0 or (d % shard == 0 and not outside)]
        problems.append(
            problem(
                "E265",
                where="layout.shard",
                found=f"ep = {ep} with shard groups of {shard} ranks (zero = {layout.zero})"
                + (f" and cp = {layout.cp} outside dp" if outside else ""),
                do=f"ep = {nearest_choices(legal, ep)}, or zero = 0",
            )
        )
    if spec is not None and spec.family not in built.EXPERT_FAMILIES:
        problems.append(
            problem(
                "E266",
                where="layout.ep",
                found=f'ep = {ep} with "{spec.name}" of family {spec.family}',
                needs="one of " + ", ".join(built.EXPERT_FAMILIES) + ", or ep = 1",
                do="ep = 1 with zero = 3",
            )
        )
    return problems


def _fuses_heads(spec: ModelSpec) -> bool:
    """Return whether a matrix of the blocks holds queries beside keys and values, or heads by their key/value head."""
    cuts = [rule(t).segments for t in spec.blocks[0].tensors]
    return any(len(set(parts)) > 1 or parts == (BY_KV_HEAD,) for parts in cuts)


def _tensor_built(spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Return what of ``spec`` the tensor axis cannot cut so far."""
    tp = layout.tp
    dp_instead = f"tp = 1,dp = {layout.dp * tp}"
    reasons: list[tuple[str, str, str]] = []
    if spec.family not in built.TENSOR_FAMILIES:
        families = "one of " + ", ".join(built.TENSOR_FAMILIES) + ", or tp = 1"
        reasons.append((f'tp = {tp} with "{spec.name}" of family {spec.family}', families, dp_instead))
    if (tp - 1) * -(-spec.vocab_size // tp) >= spec.vocab_size:
        what = (
            f"{spec.vocab_size} rows of vocabulary over tp = {tp}: {-(-spec.vocab_size // tp)} on each rank "
        )
        legal = [t for t in divisors(spec.num_heads) if (t - 1) * -(-spec.vocab_size // t) < spec.vocab_size]
        reasons.append((what + "leave the last without any", "rows on each rank", f"tp = {legal[-1]}"))
    if spec.num_kv_heads % tp and _fuses_heads(spec):
        what = f"{spec.num_kv_heads} key/value heads, fused with the queries, over tp = {tp}"
        legal = nearest_choices(divisors(spec.num_kv_heads), tp)
        reasons.append((what, "whole key/value heads on each rank", f"tp = {legal}"))
    mixture = next((b for b in spec.blocks if b.moe is not None), None) if spec.moe is not None else None
    if mixture is not None and any(t.role == "shared_out" and t.is_bias for t in mixture.tensors):
        what = f'tp = {tp} with "{spec.name}", whose shared experts have biases (mlp_bias)'
        reasons.append((what, "mlp_bias = false, or tp = 1", dp_instead))
    if any(".norms." in t.name for t in spec.blocks[0].tensors):
        what = f'tp = {tp} with "{spec.name}", which has a module of norms for every head (qk_layernorm)'
        reasons.append((what, "qk_layernorm = false, or tp = 1", dp_instead))
    if spec.family == "falcon" and not spec.attention.rope:
        what = f'tp = {tp} with "{spec.name}", whose positions are biases of every head (alibi)'
        reasons.append((what, "alibi = false, or tp = 1", dp_instead))
    return [problem("E253", where="layout.tp", found=f, needs=n, do=d) for f, n, d in reasons]


def check_optimizer(layout: Layout, name: str) -> list[Problem]:
    """Return E276 where the state of the optimizer called ``name`` cannot be offloaded (kind "code")."""
    if layout.offload == "none" or name == "adamw":
        return []
    found = f"optimizer.name = {name}, offload={layout.offload}"
    return [problem("E276", where="layout.offload", found=found)]
