"""Seconds of communication inside a block and at the ends of a model: tensor, context and expert axes."""

from __future__ import annotations

from meshwright.cost.collective import GroupShape, strided_shape
from meshwright.cost.placed import KINDS
from meshwright.cost.work import Facts, WorkKey
from meshwright.layout.context import kv_heads_sent
from meshwright.model.randomness import drops_residual
from meshwright.model.sharding import shared_norms
from meshwright.model.spec import BlockSpec


def tensor_pairs_s(facts: Facts, key: WorkKey, per_block: int, work_s: float) -> float:
    """Return seconds of tp communication, forward + backward, of ``per_block`` column-row pairs in ``work_s``."""
    if key.tp < 2:
        return 0.0
    shape = facts.tp_shape(key)
    num_bytes = key.micro_batch * facts.seq_len / key.cp * facts.spec.hidden_size * facts.compute_bytes
    if key.sp:
        pair = _placed_s(facts, "pair", num_bytes, shape, work_s / (4.0 * per_block))
        return per_block * 2.0 * (pair + facts.rates.region_s)
    reduce = _placed_s(facts, "reduce", num_bytes, shape, work_s / (2.0 * per_block))
    return per_block * 2.0 * (reduce + facts.rates.region_s + _copied_s(facts, num_bytes))


def _placed_s(facts: Facts, part: str, num_bytes: float, shape: GroupShape, work_s: float = 0.0) -> float:
    """Return seconds of a sum, or of a gather with its scatter, on the tensor axis: in its place if measured.

    ``work_s`` is what each of them has before it; without it, as much as where it was measured.
    """
    if facts.placed.has(part):
        seconds = float(facts.placed.seconds(part, num_bytes, shape))
        more = facts.placed.later(part, work_s, shape) if work_s else 0.0
        return max(seconds + more, 0.5 * seconds)
    return sum(float(facts.times.seconds(kind, num_bytes, shape)) for kind in KINDS[part])


def _after_s(facts: Facts, seconds: float, calls: float, work_s: float, shape: GroupShape) -> float:
    """Return ``seconds`` of ``calls`` collectives with what they take longer for the ``work_s`` around them all."""
    if not facts.placed.meetings or not calls:
        return seconds
    return max(seconds + calls * facts.placed.later("link", work_s / calls, shape), 0.5 * seconds)


def _copied_s(facts: Facts, num_bytes: float) -> float:
    """Return the seconds of the copy that is summed in place of a message, where regions are priced."""
    return 2.0 * num_bytes / facts.rates.copy_rate if facts.rates.region_s else 0.0


def tensor_end_s(facts: Facts, key: WorkKey, tokens: float, chunks: int, work_s: float) -> float:
    """Return seconds of tp communication, forward + backward, at an end of the model.

    Where regions are measured, as the engine runs them: one all-reduce, and for each of ``chunks`` of the loss the
    sums over ``tokens``, with ``work_s`` around them. Else as a block's half.
    """
    if not facts.rates.region_s or key.tp < 2:
        return tensor_pairs_s(facts, key, 1, work_s)
    shape = facts.tp_shape(key)
    num_bytes = key.micro_batch * facts.seq_len / key.cp * facts.spec.hidden_size * facts.compute_bytes
    each_s = work_s / (1.0 + 2.0 * chunks)
    total = _placed_s(facts, "reduce", num_bytes, shape, each_s)
    total += _copied_s(facts, num_bytes) + facts.rates.region_s
    for wide in (4.0, 8.0) if chunks else ():
        total += chunks * _placed_s(facts, "reduce", wide * tokens / chunks, shape, each_s)
    return total


def tensor_stage_s(facts: Facts, key: WorkKey) -> float:
    """Return seconds of a stage's two gathers with sp, of tokens behind its blocks and of their gradient before them.

    0 where regions are not measured: ``tensor_end_s`` has them then.
    """
    if not facts.rates.region_s or key.tp < 2 or not key.sp:
        return 0.0
    num_bytes = key.micro_batch * facts.seq_len / key.cp * facts.spec.hidden_size * facts.compute_bytes
    # a gather is taken for half of the pair
    return _placed_s(facts, "pair", num_bytes, facts.tp_shape(key)) + 2.0 * facts.rates.region_s


def tensor_again_s(facts: Facts, block: BlockSpec, key: WorkKey) -> float:
    """Return seconds of tp communication of a block's second forward: all but the sum at its end."""
    if key.tp < 2:
        return 0.0
    shape = facts.tp_shape(key)
    num_bytes = key.micro_batch * facts.seq_len / key.cp * facts.spec.hidden_size * facts.compute_bytes
    ends = 2.0 if drops_residual(facts.spec) or block.ends_in_norm else 1.0  # what reads the last sum
    around = 2.0 * facts.rates.region_s  # of four regions, forward only
    if not key.sp:
        return around + ends * (_placed_s(facts, "reduce", num_bytes, shape) + _copied_s(facts, num_bytes))
    if facts.placed.has("pair"):
        return around + (1.0 + 0.5 * ends) * _placed_s(facts, "pair", num_bytes, shape)
    gathers = 2.0 * float(facts.times.seconds("all_gather", num_bytes, shape))
    return gathers + ends * float(facts.times.seconds("reduce_scatter", num_bytes, shape))


def squares_s(facts: Facts, block: BlockSpec, key: WorkKey, work_s: float) -> float:
    """Return seconds of the sums of squares of norms over all heads, forward and backward, in ``work_s``."""
    norms = len(shared_norms(block)) if key.tp > 1 else 0
    if not norms:
        return 0.0
    num_bytes = key.micro_batch * facts.seq_len / key.cp * max(4, facts.compute_bytes)
    shape = facts.tp_shape(key)
    once = 2.0 * norms * float(facts.times.seconds("all_reduce", num_bytes, shape))
    return _after_s(facts, once, 2.0 * norms, work_s, shape)


def context_s(facts: Facts, key: WorkKey, forward: float, backward: float, work_s: float) -> float:
    """Return exposed seconds of attention's exchange.

    Ring: keys and values forward and backward, their gradients backward, each hop hidden behind one part's
    compute. Ulysses: two all-to-alls forward and two backward, nothing to hide them behind, in ``work_s`` of a block.
    A recomputed block exchanges once more forward.
    """
    if key.cp < 2:
        return 0.0
    shape = strided_shape(key.cp, key.cp_step, facts.cluster.gpus_per_node)
    tokens = key.micro_batch * facts.seq_len / key.cp
    kv_heads, size = max(1, facts.spec.num_kv_heads // key.tp), facts.spec.attention.head_dim
    forwards = 1.0 if key.recompute == "none" else 2.0
    if key.cp_style == "ulysses":
        heads = facts.spec.num_heads // key.tp
        sent = 2 * len(kv_heads_sent(heads, kv_heads, key.cp))
        swaps = (tokens * (heads + sent) * size, tokens * heads * size)
        once = sum(float(facts.times.seconds("all_to_all", n * facts.compute_bytes, shape)) for n in swaps)
        return _after_s(facts, (forwards + 1.0) * once, 2.0 * (forwards + 1.0), work_s, shape)
    numel = 2.0 * tokens * kv_heads * size
    hop = float(facts.times.seconds("send", numel * facts.compute_bytes, shape))
    gradients = float(facts.times.seconds("send", numel * max(4, facts.compute_bytes), shape))
    hops = key.cp - 1
    if not facts.rates.overlaps:
        return hops * ((forwards + 1.0) * hop + gradients)
    ahead = max(0.0, hop - forward / key.cp)
    return hops * (forwards * ahead + max(0.0, hop + gradients - backward / key.cp))


def expert_s(facts: Facts, block: BlockSpec, key: WorkKey, tokens: float, work_s: float) -> float:
    """Return seconds of the all-to-alls: counts, dispatch and combine, back, and again where it is recomputed.

    They stand in ``work_s`` of a block.
    """
    if block.moe is None or key.ep < 2:
        return 0.0
    shape = facts.expert_shape(key)
    num_bytes = tokens * block.moe.experts_per_token * facts.spec.hidden_size * facts.compute_bytes
    rows = float(facts.times.seconds("all_to_all", num_bytes, shape))
    counts = float(facts.times.seconds("all_to_all", 8.0 * block.moe.num_experts, shape))
    forwards = 1.0 if key.recompute == "none" else 2.0
    return _after_s(
        facts, forwards * counts + (2.0 + 2.0 * forwards) * rows, 2.0 + 3.0 * forwards, work_s, shape
    )
