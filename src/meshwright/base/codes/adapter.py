"""Codes about adapters, offload and compiled blocks (E271-E288, E292)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E271",
        title="An adapter's target is no matrix of the model's blocks",
        kind="input",
        why="an adapter stands beside a linear layer of a block",
        needs="last parts of module names, such as q_proj or down_proj; experts for a mixture's",
        do="name linear layers of the blocks, or leave adapter.targets out",
        page="""adapter.targets names linear layers by the last part of their module's name, as peft does, and the
experts of a mixture by "experts" or by one of their two tensors, such as experts.down_proj. Without it every linear layer
of attention and of the dense feed-forward gets an adapter. Embedding, head, norms and routers take none.""",
    ),
    CodeInfo(
        code="E285",
        title="A single matrix of an expert cannot have an adapter",
        kind="input",
        why="transformers stacks all experts of a mixture in two tensors, which peft adapts as a whole, by their names",
        needs="experts, experts.gate_up_proj or experts.down_proj",
        do="name the experts' tensor as it is stored",
        page="""transformers keeps a mixture's experts in two parameters, gate_up_proj and down_proj, [experts, out, in].
peft (target_parameters) gives such a parameter one pair of factors for each expert; gate and up share theirs, because
they are one matrix of twice the width. Older files have w1, w2, w3 or gate_proj, up_proj for each expert: there is no
such layer to put an adapter beside. In a model with experts peft takes these names for the experts wherever they stand,
so that the dense and shared feed-forwards of such a model have no adapter either.""",
    ),
    CodeInfo(
        code="E292",
        title="Adapters beside this model's experts are not built yet",
        kind="code",
        why="factors of experts are known for matrices stored [experts, out, in], without biases",
        needs="layers of attention as targets, in a model whose experts are stored [experts, in, out]",
        do="leave adapter.targets out: attention gets the adapters",
        page="""gpt-oss stores its experts' matrices the other way round than other mixtures, gate and up number by number
next to each other, with biases. Adapters of its attention run on every axis; those of its experts are not built.""",
    ),
    CodeInfo(
        code="E272",
        title="A base in 4 bits cannot run here",
        kind="world",
        why="QLoRA packs and unpacks the frozen weights with bitsandbytes' kernels, for the device that trains",
        needs="bitsandbytes 0.50 or newer, built for this machine",
        do="pip install 'meshwright[quantised]', or kind = lora (with zero=3 the ranks share the frozen weights)",
        page="""QLoRA holds the matrices of the blocks in 4 bits and unpacks one at a time when it is multiplied with. The
package that does it is an extra of its own, because only such runs need it. What is missing is named: the package, or
its library for this machine's device. LoRA with zero=3 needs storage / dp bytes per frozen weight and no gradient or
optimizer state for them.""",
    ),
    CodeInfo(
        code="E282",
        title="The tensor axis would cut inside a 4-bit block",
        kind="math",
        why="64 neighbouring weights share a scale, so ranks that share a block would each need all of it",
        needs="begin and size of every part a multiple of 64 weights",
        do="a smaller tp, or dp and pp",
        page="""A matrix in 4 bits is taken in blocks of 64 weights along its rows as they are stored. It is packed whole
and then cut, so that every layout holds the same base. A cut between rows falls on a border when the row length times
the rows of a part is a multiple of 64; a cut inside rows when both the row and the part of it are.""",
    ),
    CodeInfo(
        code="E283",
        title="This does not run with a base in 4 bits",
        kind="code",
        why="a matrix in 4 bits is unpacked by a call of bitsandbytes, and nothing brings it from elsewhere so far",
        needs="compile=off, offload=none | optimizer | optimizer-nvme",
        do="the nearest one that runs, as the line says",
        page="""Unpacking is a call of bitsandbytes that compiled blocks would have to leave out. Parameters that rest in
host memory or files are whole numbers of the storage dtype; packed bytes stay on the device, where zero = 3 cuts them
over the ranks.""",
    ),
    CodeInfo(
        code="E284",
        title="A mixture's experts are not held in 4 bits",
        kind="code",
        why="they are most of the model, and would stay as they are",
        needs="a model without experts, or kind = lora",
        do="kind = lora with zero=3 or ep, which cut the experts over the ranks",
        page="""transformers stacks all experts of a mixture in one tensor, which is multiplied by groups of rows.
Packing it expert by expert is not built; with the attention alone in 4 bits the memory would hardly change.""",
    ),
    CodeInfo(
        code="E287",
        title="The checkpoint holds no base to merge with or compare",
        kind="input",
        why="a run on a base in 4 bits saves what trains; its base is packed again from the model's own weights",
        needs="export without --merge-adapter and --check-logits",
        do="export the adapter, and load it with peft beside the model in the precision that you want",
        page="""The factors were trained beside the rounded weights. They load beside the model's full-precision weights
(the usual way) or beside weights that bitsandbytes rounds again in the same way.""",
    ),
    CodeInfo(
        code="E288",
        title="The checkpoint was trained beside another base",
        kind="input",
        why="factors that were trained beside other weights would go on from a model that never was",
        needs="the weights (model.weights, or run.seed of random ones) and the settings of the first run",
        do="name the same weights, or begin a new run",
        page="""A checkpoint of a run on a base in 4 bits does not hold the base, but a sum over the packed bytes of each
matrix. A run that goes on packs its base again and compares.""",
    ),
    CodeInfo(
        code="E273",
        title="peft is not installed",
        kind="world",
        why="adapters run through peft's own layers, so that what is trained loads there again",
        needs="the version of peft in requirements.lock",
        do="make venv, or pip install -r requirements.lock",
        page="""LoRA layers, their configuration file and the format of saved adapters are peft's. Only runs with an
adapter need it.""",
    ),
    CodeInfo(
        code="E274",
        title="The adapter's text cannot be read",
        kind="input",
        why="the rank decides what is trained",
        needs="lora:RANK[:ALPHA] or qlora:RANK[:ALPHA], RANK from 1 to 65,536, ALPHA above 0 and below 1,000,000,000",
        do="for instance lora:8, or lora:8:16",
        page="""The product of the two factors is scaled by alpha / rank. Without ALPHA it is twice the rank. Targets,
and the levels of a base in 4 bits, can be named in the run file only (adapter.targets, adapter.levels).""",
    ),
    CodeInfo(
        code="E275",
        title="The adapter's factors are not those of the plan",
        kind="fault",
        why="a factor that is missing, empty or of another shape would be lost without a word",
        needs="A [rank, in] and B [out, rank] for every target matrix, whole",
        do="report it, with the plan; for a checkpoint: export the one before it",
        page="""peft made other layers than the plan describes, or a checkpoint lacks a factor or holds it with another
shape. A saved adapter has every factor whole, whatever layout trained it.""",
    ),
    CodeInfo(
        code="E281",
        title="There is no adapter to merge",
        kind="input",
        why="--merge-adapter adds an adapter's factors to the weights of its base",
        needs="a checkpoint of a run with an adapter, or no --merge-adapter",
        do="leave --merge-adapter out",
        page="""A checkpoint without an adapter is exported whole: there is nothing to add.""",
    ),
    CodeInfo(
        code="E276",
        title="This optimizer's state cannot be offloaded",
        kind="code",
        why="offload moves AdamW's two moments piece by piece; other state is not built",
        needs="optimizer.name = adamw with any offload",
        do="optimizer.name = adamw, or offload=none",
        page="""SGD keeps at most one buffer per parameter; with zero >= 1 it is sharded like the rest.""",
    ),
    CodeInfo(
        code="E277",
        title="Offloaded state came back damaged",
        kind="world",
        why="an update with wrong moments would go on without a word",
        needs="bytes as they were written",
        do="check the disk, and resume from the last checkpoint",
        page="""Every tensor's moments have a checksum, taken when they are written to their file and held against the
bytes when they are read for the next update and before a checkpoint takes them. So has every parameter that rests in a
file (offload=parameters-nvme), each time that it comes to the device.""",
    ),
    CodeInfo(
        code="E278",
        title="The folder for offloaded state cannot be used",
        kind="world",
        why="the space of every file is reserved before the first step, so that a full disk is found then",
        needs="a folder that can be written, with room for 8 (with parameters 12) bytes per parameter of each rank",
        do="name a folder that can be written with run.offload_dir, or free some space",
        page="""offload=optimizer-nvme keeps the optimizer's state in files, parameters-nvme the parameters too, by
default in the run folder's "offload". A local NVMe disk is the right place; a network disk makes every step wait for it.
The files are removed at the end.""",
    ),
    CodeInfo(
        code="E279",
        title="compile=blocks cannot run like this",
        kind="code",
        why="a compiled block is one operation to what stands around it, and needs a compiler for its kernels",
        needs="recompute=none or full, whole backwards, on a CPU a C++ compiler",
        do="compile=off",
        page="""Selective recompute chooses among the operations of a block and sees none inside a compiled one.
Backwards in two halves cannot be cut out of a compiled one, whose backward is one operation. The default backend writes
C++ for CPUs and needs g++ or clang++ there. Proofs compile with a backend that traces ahead and runs torch's own
kernels.""",
    ),
)
