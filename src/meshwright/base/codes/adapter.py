"""Codes about adapters, offload and compiled blocks (E271-E285, E292)."""

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
        kind="code",
        why="QLoRA keeps the frozen weights in 4 bits through bitsandbytes, which is not among the locked packages",
        needs="kind = lora",
        do="kind = lora with zero=3, which cuts the frozen weights over the ranks",
        page="""QLoRA stores the base in 4-bit blocks and unpacks them in every forward. The package that does it is not
among the versions this program is tested with, so nothing could be proved about it. LoRA under zero=3 needs
storage / dp bytes per frozen weight and no gradient or optimizer state for them.""",
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
        needs="lora:RANK or lora:RANK:ALPHA, RANK from 1 to 65,536, ALPHA above 0 and below 1,000,000,000",
        do="for instance lora:8, or lora:8:16",
        page="""The product of the two factors is scaled by alpha / rank. Without ALPHA it is twice the rank. Targets
can be named in the run file only (adapter.targets).""",
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
