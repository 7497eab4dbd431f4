"""Codes about layouts, ranks and batches that cannot be (E2xx)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E201",
        title="tp does not divide the query heads",
        kind="math",
        why="a rank keeps whole heads",
        needs="num_attention_heads % tp == 0",
        do="choose a tp that divides the heads",
        page="""Tensor parallelism gives each rank num_attention_heads / tp whole heads. A head that is split over two
ranks would need its own communication inside attention. Choose a divisor of the head count.""",
    ),
    CodeInfo(
        code="E202",
        title="The key/value heads cannot be split over tp",
        kind="math",
        why="a rank keeps whole key/value heads, or whole copies of them",
        needs="num_key_value_heads % tp == 0 (split), or tp % num_key_value_heads == 0 (replicate)",
        do="a tp that divides the key/value heads, or a multiple of them",
        page="""With grouped-query attention there are fewer key/value heads than query heads. Each rank gets
num_key_value_heads / tp of them (kv_heads=split); with tp above that number, tp / num_key_value_heads ranks each have a
copy of the same head (kv_heads=replicate, which a plan writes out), at the cost of their memory and a sum of their
gradients.""",
    ),
    CodeInfo(
        code="E203",
        title="tp does not divide the feed-forward width",
        kind="math",
        why="a rank keeps equal slices of the feed-forward matrices",
        needs="ffn width % tp == 0",
        do="choose a tp that divides the width",
        page="""The first matrix of an MLP is cut by output rows and the second by input columns, into tp equal parts.
For a mixture of experts the same holds for the experts' own width.""",
    ),
    CodeInfo(
        code="E204",
        title="Sequence-sharded norms need tensor parallelism",
        kind="math",
        why="sp shards norms and residuals over the tp axis, which has one rank here",
        needs="tp > 1 with sp=on",
        do="sp=off, or tp > 1",
        page="""sp is not an axis of its own: it uses the ranks of tp. To split long sequences
over more ranks, use cp.""",
    ),
    CodeInfo(
        code="E205",
        title="The sequence does not split over tp",
        kind="math",
        why="sp shards the sequence in tp equal parts between the matrices",
        needs="seq_len % tp == 0",
        do="choose a seq_len that tp divides, or sp=off",
        page="""With sp=on each tp rank holds seq_len / (cp * tp) positions of the norms and residuals. With cp above 1
the sequence is padded for both axes (W260).""",
    ),
    CodeInfo(
        code="E207",
        title="cp_style=ulysses needs heads that cp divides",
        kind="math",
        why="Ulysses exchanges sequence for heads: inside attention a rank holds whole heads",
        needs="(num_attention_heads / tp) % cp == 0",
        do="a smaller cp, or cp_style=ring",
        page="""The all-to-all gives every cp rank the whole sequence of heads / (tp * cp) heads. The ring has no such
limit.""",
    ),
    CodeInfo(
        code="E208",
        title="ep does not divide dp * cp",
        kind="math",
        why="expert parallelism borrows its ranks from dp and cp",
        needs="dp * cp % ep == 0",
        do="choose an ep that divides dp * cp",
        page="""ep adds no ranks to the world: the ranks that are replicas for the dense layers
hold different experts.""",
    ),
    CodeInfo(
        code="E209",
        title="ep does not divide the experts",
        kind="math",
        why="a rank keeps whole experts, as many as any other",
        needs="num_experts % ep == 0",
        do="choose an ep that divides the experts",
        page="""Each ep rank holds num_experts / ep experts of every layer.""",
    ),
    CodeInfo(
        code="E210",
        title="ep needs a mixture of experts",
        kind="math",
        why="a dense model has no experts to spread",
        needs="a model with experts, or ep=1",
        do="ep=1",
        page="""Expert parallelism places whole experts on different ranks. Dense layers are cut by tp.""",
    ),
    CodeInfo(
        code="E211",
        title="More pipeline stages than layers",
        kind="math",
        why="a stage without a layer has nothing to compute",
        needs="pp * chunks <= number of layers",
        do="choose a smaller pp",
        page="""Each of the pp * chunks stages holds at least one layer; the first also holds the embedding, the last the
final norm and the head.""",
    ),
    CodeInfo(
        code="E212",
        title="The written cut does not fit the model",
        kind="math",
        why="each layer is placed on exactly one stage",
        needs="one number per stage, none of them 0, with the model's layers as their sum",
        do="cut=auto, or correct the numbers",
        page="""cut=7/9/8/8 gives the first stage 7 layers, the next 9, and so on. cut=auto balances the stages by their
FLOPs, with the head counted; cut=even gives equal numbers and the remainder to the middle stages.""",
    ),
    CodeInfo(
        code="E213",
        title="shard does not fit dp and cp",
        kind="math",
        why="shard groups are whole parts of dp * cp, and hold whole cp groups",
        needs="shard divides dp * cp and is a multiple of cp",
        do="choose a shard that fits",
        page="""shard is the number of ranks that one copy of the sharded state is spread over. Equal to dp * cp: all of
them; smaller: HSDP, with dp * cp / shard copies.""",
    ),
    CodeInfo(
        code="E214",
        title="zero >= 1 with a shard group of one rank",
        kind="math",
        why="ZeRO shards state over the shard group, and one rank shards nothing",
        needs="shard > 1 with zero >= 1 and dp * cp > 1",
        do="zero=0, or leave shard out",
        page="""zero=1 shards optimizer state, zero=2 also gradients, zero=3 also parameters, over the shard group. For
plain replicas write zero=0.""",
    ),
    CodeInfo(
        code="E215",
        title="The layout does not fill the world",
        kind="math",
        why="every rank has one place in the mesh",
        needs="dp * tp * pp * cp == number of ranks",
        do="change a degree, or the number of ranks",
        page="""World size = dp * tp * pp * cp. ep and shard are borrowed from dp * cp and add no ranks.""",
    ),
    CodeInfo(
        code="E216",
        title="A split-backward schedule cannot use zero=3",
        kind="math",
        why="the weight half of a backward runs after the parameters were dropped: gradients come out wrong",
        needs="zero <= 2 with zb-h1, zbv or dualpipev",
        do="zero=2, or schedule=1f1b",
        page="""zero=3 drops a unit's parameters after its backward. Zero-bubble schedules run the input half and the
weight half of a backward at different times; measured on torch 2.13, stages then get no or wrong gradients
without any error. zero=1 and zero=2 keep the parameters to the end of the step.""",
    ),
    CodeInfo(
        code="E217",
        title="shard is written without zero",
        kind="math",
        why="nothing is sharded at zero=0",
        needs="zero >= 1 with shard > 1",
        do="zero=1, or leave shard out",
        page="""shard is the size of the group that ZeRO shards over; with zero=0 all state is replicated.""",
    ),
    CodeInfo(
        code="E218",
        title="Interleaved schedules need micro-batches in whole rounds",
        kind="math",
        why="micro-batches go through the chunks in rounds of pp",
        needs="accumulation % pp == 0",
        do="choose a batch whose accumulation pp divides",
        page="""An interleaved schedule has chunks stages per rank, and runs pp micro-batches through one chunk before
the next.""",
    ),
    CodeInfo(
        code="E219",
        title="The model has too few positions for this sequence length",
        kind="math",
        why="learned positions exist up to max_position_embeddings only",
        needs="seq_len <= max_position_embeddings",
        do="a shorter seq_len",
        page="""A model with a table of learned positions cannot be given a position beyond it. Models with rotary
positions can, which is a warning (W219).""",
    ),
    CodeInfo(
        code="E220",
        title="The global batch does not divide",
        kind="math",
        why="every replica does the same number of whole micro-batches",
        needs="global batch % (dp * micro_batch) == 0",
        do="choose a batch that divides",
        page="""global batch = dp * micro_batch * accumulation, in sequences per optimizer step. dp is the degree over
the whole world, not over one node. The refusal names the nearest batches that divide.""",
    ),
    CodeInfo(
        code="E221",
        title="The global batch is smaller than one micro-batch per replica",
        kind="math",
        why="each replica needs at least one whole micro-batch",
        needs="global batch >= dp * micro_batch",
        do="a larger batch, or a smaller micro_batch or dp",
        page="""dp replicas, each with micro_batch sequences per forward, use dp * micro_batch sequences at the least.""",
    ),
    CodeInfo(
        code="E222",
        title="Batch or sequence length is out of range",
        kind="input",
        why="a step without a token has nothing to learn from",
        needs="a whole number from 1 upwards",
        do="give a positive number",
        page="""The global batch counts sequences per optimizer step over the whole job; seq_len counts tokens per
sequence.""",
    ),
    CodeInfo(
        code="E223",
        title="chunks does not fit the schedule",
        kind="math",
        why="only interleaved and V-shaped schedules have several stages per rank",
        needs="chunks=1 for gpipe, 1f1b and zb-h1; chunks=2 for zbv and dualpipev; chunks >= 2 for interleaved",
        do="leave chunks out",
        page="""chunks is the number of stages on one pipeline rank, so a model is cut in pp * chunks stages. Several
short stages per rank make the bubble smaller and send more often.""",
    ),
    CodeInfo(
        code="E224",
        title="One step has too many micro-batches",
        kind="input",
        needs="micro-batches x stages within what a schedule can hold",
        why="a step's schedule is written out action by action, so its length is bounded",
        do="a smaller global batch, or a larger micro_batch or dp",
        page="A step runs every micro-batch through every stage, and its schedule is a list of these actions. A\n"
        "number of micro-batches far above any real run is more often a slip of the keyboard than a wish, and\n"
        "would take minutes and gigabytes only to write down.",
    ),
    CodeInfo(
        code="E250",
        title="This axis is not built yet",
        kind="code",
        why="Meshwright can plan it but not run it so far",
        needs="axes that are built: dp (with zero and shard), cp, ep, tp (with sp) and pp",
        do="set the degree to 1 and use dp, zero, tp, cp or pp",
        page="""What runs now: dp with zero=0, 1, 2, 3 and shard (HSDP), cp as ring or Ulysses, ep, tp with sp=on or off,
and pp with every schedule. The other axes have their rank arithmetic and rules, and the planner may price them.""",
    ),
    CodeInfo(
        code="E251",
        title="This option of the layout is not built yet",
        kind="code",
        why="Meshwright can plan it but not run it so far",
        needs="a value that is built",
        do="leave the key out",
        page="""What runs now: loss=eager or chunked, any recompute, any offload,
compile=off or blocks, every schedule, and precision fp32, bf16, fp16 and fp64.""",
    ),
    CodeInfo(
        code="E252",
        title="Pipelines of this model family are not built yet",
        kind="code",
        why="a family's modules must be known to be cut in stages",
        needs="a family that is built, or pp=1",
        do="pp=1 with dp and zero",
        page="""Every family that is described can be cut in stages now; a family that is added later may run with data
parallelism and ZeRO first.""",
    ),
    CodeInfo(
        code="E253",
        title="The tensor axis cannot cut this model yet",
        kind="code",
        why="a family's modules must be known to be cut over tp",
        needs="a family that is built, whole key/value heads where they are fused, vocabulary rows for every rank",
        do="tp=1 with dp, zero or pp",
        page="""Every family is cut over tp now: fused matrices part by part, each expert like a feed-forward; a family
that is added later may come without. Phi-3 and Falcon keep queries, keys and values in one matrix: there a key/value
head cannot live on several ranks, so tp divides their number (Falcon-7B has one, so it runs with tp=1). Biases of shared
experts (DeepSeek-V2 with mlp_bias) would be added once on each rank. StableLM-2-12B has a module of norms for every head,
and Falcon-RW adds biases by position to each head: neither is cut.
Vocabulary rows are cut ceil(rows / tp) to a rank; a vocabulary so small that the last rank gets none is refused.
What is refused runs with data parallelism, ZeRO and pipelines.""",
    ),
    CodeInfo(
        code="E255",
        title="A parallel loss needs a tensor axis",
        kind="math",
        why="loss=parallel sums the loss over vocabulary columns that lie on the ranks of tp",
        needs="tp = 2 or more, or loss=eager or chunked",
        do="loss=eager",
        page="""With tp above 1 the head is cut by vocabulary rows, and the loss is computed from each rank's own columns:
that is what loss=eager does there too, and loss=parallel asks for it by name. loss=chunked does the same a chunk of
tokens at a time. With tp=1 one rank has all columns, and there is nothing to sum.""",
    ),
    CodeInfo(
        code="W207",
        title="Random numbers of this model depend on the layout",
        kind="math",
        why="the model draws them from each process's own generator, so another layout draws others",
        needs="dropout by modules or by attention functions (gpt2, llama and most families), without router jitter",
        do="set them to 0 in the model's config where runs of different layouts must agree",
        page="""Initial weights, and the dropout masks of most families, are the same in every layout and world size.
Families that call dropout as a function (OPT, BLOOM, StarCoder2, Falcon, Seed-OSS) and the jitter of a router draw from
torch's own generator: each run is valid, but two layouts are then two different runs. A proof lets them rest.""",
    ),
    CodeInfo(
        code="E260",
        title="The context axis cannot run this model yet",
        kind="code",
        why="a family's attention must be known to do nothing that an attention over ranks leaves out",
        needs="a family that is built, and dropout whose masks follow from the element, or cp=1",
        do="cp=1 with dp, zero or pp",
        page="""Every family but BLOOM and Falcon is cut over cp now, with causal masks, sliding windows, soft-capped
scores, attention sinks, packed documents and dropout. BLOOM adds biases by position inside its own modules, which count
positions from 0 on every rank; Falcon's modules call torch's attention themselves, so no other can take its place.
Where a router's jitter makes a model draw from each process's own generator (W207), its attention dropout does so
too, and over cp there would be nothing to hold it against.""",
    ),
    CodeInfo(
        code="E262",
        title="The model's attention asks for something that is not done over ranks",
        kind="code",
        why="a mask or a change of the scores that was left out would train another model in silence",
        needs="causal attention, with or without a sliding window, without masks of its own",
        do="cp=1",
        page="""With cp above 1 the attention of the model is taken over through transformers' attention interface. What a
query sees follows from positions and documents; every other argument that a model hands to its attention is refused,
unless it is known to change nothing in training.""",
    ),
    CodeInfo(
        code="E265",
        title="The expert axis does not fit the shard group",
        kind="math",
        why="with ZeRO the ranks that hold the same experts share their state as far as they are in one shard group",
        needs="ep divides shard, or with cp inside dp shard divides ep (shard is dp * cp where it is not written)",
        do="an ep that divides shard or is a multiple of it, or zero=0",
        page="""The expert axis is borrowed from dp x cp: ep neighbouring ranks hold all experts of a mixture between
them. ZeRO spreads everything else over the shard group, and an expert over the part of that group that holds
it: shard / ep ranks. Where ep takes in several whole shard groups an expert is on one rank of each ep, and its state is
not spread any further. With shard=6 and ep=4 the same experts would be on two ranks of one shard group and on one of the
next. Several shard groups with cp outside dp in order are not proved, and refused.""",
    ),
    CodeInfo(
        code="E266",
        title="Expert parallelism of this model family is not built yet",
        kind="code",
        why="a family's experts and router must be known to be spread",
        needs="a family that is built, or ep=1",
        do="ep=1 with zero=3, which shards the experts' state",
        page="""Spread over ranks now: the experts of mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, glm4_moe
and gpt_oss.""",
    ),
    CodeInfo(
        code="W265",
        title="The experts' matrices do not fit torch's grouped product",
        kind="cost",
        why="torch's grouped matrix product wants rows of a multiple of 16 bytes",
        do="hidden_size and the experts' width as multiples of 8, where the model is yours to choose",
        page="""torch multiplies all experts of a mixture in one call when hidden_size and the experts' width, in bytes
of the compute precision, are multiples of 16. Otherwise each expert is multiplied by itself: the same numbers,
with one call per expert.""",
    ),
    CodeInfo(
        code="W201",
        title="Key/value heads are replicated over tp",
        kind="cost",
        why="copies of key/value heads take memory on every rank that has one",
        do="a tp of at most the key/value heads avoids it",
        page="""With tp > num_key_value_heads each key/value head lives on tp / num_key_value_heads ranks.""",
    ),
    CodeInfo(
        code="W202",
        title="The vocabulary does not divide by tp",
        kind="cost",
        why="the embedding and head are cut by vocabulary rows, so the last rank's part is smaller",
        do="nothing has to be done",
        page="""Each rank holds ceil(vocabulary / tp) rows and the last one what is left. Nothing is padded: the loss sums
over the columns that there are, and is one device's.""",
    ),
    CodeInfo(
        code="W203",
        title="ZeRO over one rank shards nothing",
        kind="cost",
        why="with dp * cp = 1 there is no other rank to share state with",
        do="zero=0 says the same",
        page="""The layout runs exactly as zero=0: no state is sharded and no data-parallel collective runs.""",
    ),
    CodeInfo(
        code="W204",
        title="ZeRO-2 or 3 with a pipeline communicates for every micro-batch",
        kind="cost",
        why="gradients are reduce-scattered (and with zero=3 parameters gathered) for each micro-batch",
        do="zero=1 communicates once per step",
        page="""A pipeline wants many micro-batches; ZeRO-2 reduces gradients after each of them to keep only a shard,
ZeRO-3 also gathers the parameters for each forward and each backward. It is right, and it pays in volume:
the warning gives the bytes. zero=1 keeps whole gradients on each rank and reduces them once.""",
    ),
    CodeInfo(
        code="W206",
        title="A tensor-parallel group spans nodes",
        kind="cost",
        why="tp communicates inside every layer and wants the fastest links",
        do="keep tp within a node and innermost in order",
        page="""Groups are placed by rank number: with order=tp/cp/dp/pp, tp groups are neighbours. A tp group spans
nodes when tp is larger than a node, does not divide it, or is not innermost.""",
    ),
    CodeInfo(
        code="W219",
        title="The sequence is longer than the model was made for",
        kind="cost",
        why="rotary positions beyond max_position_embeddings were not seen in pre-training",
        do="a shorter seq_len, or a model with scaled positions",
        page="""The step is computed rightly; whether the model copes with such positions is another question.""",
    ),
    CodeInfo(
        code="W260",
        title="The sequence is padded for cp",
        kind="cost",
        why="every rank of the context axis holds equally many positions",
        do="a seq_len that splits pads nothing",
        page="""The ring cuts a sequence in 2 * cp pieces and gives rank i the pieces i and 2 * cp - 1 - i, so that all do
equal work under a causal mask; Ulysses cuts it in cp pieces; with sp=on each rank's positions also split over tp.
A sequence that does not split is padded at its end. The padding has no label and nothing real attends to it, so loss
and gradients are those of the sequence as it is; its positions are computed for nothing.""",
    ),
)
