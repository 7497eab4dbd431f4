"""Codes about checkpoints and exports (E7xx)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E701",
        title="There is no checkpoint here",
        kind="input",
        why="the folder is not there, or holds no complete checkpoint",
        needs="a folder step-N, or a run folder with a complete one in checkpoints/",
        do="name a folder step-N; meshwright checkpoint inspect RUN_DIR takes the newest",
        page="""A checkpoint is a folder step-N with a manifest.json, which is written last.
A command takes such a folder, or a run folder, whose newest complete checkpoint it then uses.
The message lists the folders that were looked at and why each one does not count.""",
    ),
    CodeInfo(
        code="E702",
        title="The checkpoint is incomplete",
        kind="input",
        why="a save that was interrupted, or a copy that was cut short, is not a state of the run",
        needs="manifest.json and every file in it, of the size it says",
        do="use an earlier checkpoint (resuming does so by itself), or copy the folder again",
        page="""A save writes the shards first, manifest.json last, and renames the folder to step-N at the end.
A folder without a manifest is a save that did not finish; a file of another size was cut short afterwards.
Resuming passes over such folders, says why, and takes the newest complete one.""",
    ),
    CodeInfo(
        code="E703",
        title="Writing failed",
        kind="world",
        why="one rank could not write, so no rank has a checkpoint of this step",
        needs="room and permission to write in the folder, on every node",
        do="free space or correct the permission; checkpoints that were complete before are untouched",
        page="""The message names the rank and the system's own words (no space left on device, permission denied).
All ranks end with the same error, the partial folder is removed, and earlier checkpoints stay as they were.
A checkpoint needs about 12 bytes per parameter with AdamW in fp32: parameter, two moments.
An export needs the bytes of the parameters alone, in the dtype that is asked for.""",
    ),
    CodeInfo(
        code="E704",
        title="The ranks do not share the checkpoint folder",
        kind="world",
        why="every rank writes its own shards into one folder, and a folder on a node's own disk has only that node's",
        needs="one folder that all nodes see under the same path",
        do="set run.dir to a path on a shared file system",
        page="""Each rank writes its shards; rank 0 then checks that it sees every file in its full size.
On several nodes the folder must lie on a file system that they share (NFS, Lustre, a mounted volume).
A file system that shows new files late can cause this too: mount it without attribute caching.""",
    ),
    CodeInfo(
        code="E705",
        title="Tensors are missing from the checkpoint",
        kind="input",
        why="a parameter or optimizer entry that is not loaded would keep its random or zero value unseen",
        needs="every tensor of the run, under its logical name",
        do="load it with the model config, adapter, freeze patterns and optimizer that it was saved with",
        page="""Names are compared before anything is loaded; nothing is loaded when one is missing.
Common causes: another model config, a wrapper's prefix (module., _orig_mod.), another optimizer (AdamW
keeps exp_avg, exp_avg_sq and step; SGD keeps momentum_buffer), or a parameter that was frozen in the saved run.
To take the weights alone into a new run, export them and set model.weights to the exported folder.""",
    ),
    CodeInfo(
        code="E706",
        title="The checkpoint holds tensors that the run does not have",
        kind="input",
        why="state that is left behind unseen is a run that goes on from another point than it says",
        needs="a run that takes every stored tensor",
        do="load it with the model config, adapter, freeze patterns and optimizer that it was saved with",
        page="""Every tensor of the checkpoint must have its place on some rank of the run.
Left-over parameters mean another model or a wrapper's prefix; left-over optimizer entries mean another
optimizer, or a parameter that is frozen now and was trained before.
To take the weights alone into a new run, export them and set model.weights to the exported folder.""",
    ),
    CodeInfo(
        code="E707",
        title="Stored shapes differ from the model's",
        kind="input",
        why="a tensor of another shape belongs to another model",
        needs="the logical shape of every tensor, whatever the layout",
        do="use the model config that the checkpoint's manifest keeps (meshwright checkpoint inspect shows it)",
        page="""Shapes are those of whole tensors, so another layout never changes them.
A vocabulary that was padded or a tokenizer that grew changes the embedding and the head.""",
    ),
    CodeInfo(
        code="E708",
        title="Stored dtypes differ from the run's",
        kind="input",
        why="fp32 state that passes through a narrower dtype has lost digits for good, and nobody sees it in the loss",
        needs="the storage dtype of the run that saved it",
        do="use the precision of the saved run in the layout, or export the weights with a dtype and start from them",
        page="""Parameters and optimizer state are loaded bit for bit, never cast.
precision=fp64 stores float64; fp32, bf16 and fp16 store float32 masters, so these three can be exchanged.
An export (meshwright checkpoint export) casts on purpose and writes the dtype into config.json.""",
    ),
    CodeInfo(
        code="E709",
        title="The checkpoint is damaged",
        kind="input",
        why="bytes on the disk are not those that were written",
        needs="the checksums of every file as the manifest has them",
        do="use another checkpoint, or copy the named file again from where it is whole",
        page="""The CRC-32 of every tensor piece is in manifest.json, the SHA-256 of files without pieces too.
meshwright checkpoint verify reads all files and names the damaged file and the tensors in the damaged part.
Loading, exporting and verifying read every byte and check it first.
Damage in .metadata concerns the index of all tensors.
Bytes that change on a disk point to the disk, the file system or the memory of the machine that wrote them.""",
    ),
    CodeInfo(
        code="E710",
        title="The checkpoint's index holds more than tensors",
        kind="input",
        why="the index is a pickle; a crafted one runs code in the process that reads it, so only known classes are read",
        needs="an index of tensors in files of this folder",
        do="take the checkpoint only from where you trust; delete this one",
        page="""torch's distributed checkpoint keeps its index .metadata as a pickle.
It is read here by an unpickler that knows the dozen classes an index is made of and calls nothing else.
Entries that are not tensors, files outside the folder and stored transforms are refused too.
The message names what was found; nothing of it was run.""",
    ),
    CodeInfo(
        code="E711",
        title="A shard cannot be read",
        kind="world",
        why="the index names a piece of a tensor that the file does not hold",
        needs="the files that the index was written with",
        do="run meshwright checkpoint verify; use another checkpoint",
        page="""The message names the tensor, the file and the reader's own words.
A manifest, an index and shards from different saves in one folder lead to this.""",
    ),
    CodeInfo(
        code="E712",
        title="The output folder is not empty",
        kind="input",
        why="files of two exports in one folder would be taken for one model",
        needs="a path that does not exist yet, or an empty folder",
        do="name another --out, or remove what is there",
        page="""An export is written aside and gets its name when it is whole; nothing is overwritten.""",
    ),
    CodeInfo(
        code="E713",
        title="The checkpoint does not say which model it is",
        kind="input",
        why="config.json is made from the plan that the manifest keeps",
        needs="a manifest with plan.model_config",
        do="export a checkpoint that meshwright train wrote",
        page="""meshwright train keeps the plan, with the model's config, in every checkpoint's manifest.json.
A checkpoint written through the Python API has what its caller put there.""",
    ),
    CodeInfo(
        code="E714",
        title="The dtype of the export is not clear",
        kind="input",
        why="the file's dtype and the one in config.json must be one and the same",
        needs="fp64, fp32, bf16 or fp16; or stored parameters of one dtype",
        do="give --dtype bf16 (or fp32)",
        page="""Without --dtype the tensors keep the dtype they are stored in, which is float32 for mixed precision.
config.json gets the same dtype, so that loading with the config's dtype changes nothing.""",
    ),
    CodeInfo(
        code="E715",
        title="The exported model answers differently",
        kind="fault",
        why="the exported files must give the logits of the checkpoint",
        needs="equal logits, up to a few roundings of the dtype",
        do="do not use the export; report the model's config and this message",
        page="""--check-logits loads the exported folder with transformers, builds a second model straight from the
checkpoint, and compares the logits of both on the same tokens.
A tensor that transformers misses or does not know is reported in the same way.""",
    ),
    CodeInfo(
        code="E716",
        title="Optimizer state without a logical name",
        kind="fault",
        why="state is stored by the logical name of its parameter, so that any layout can find it",
        needs="an optimizer over the named parameters, whose state is tensors and numbers",
        do="build the optimizer from the parameters that are saved, after they are sharded",
        page="""An optimizer that was built before the model was sharded holds other parameter objects than the model.
Build it afterwards. State entries must be tensors or plain numbers.""",
    ),
    CodeInfo(
        code="E717",
        title="The checkpoint's extra values are not JSON",
        kind="input",
        why="everything beside tensors is kept as JSON, which runs no code when it is read",
        needs="strings, finite numbers, booleans, null, lists and objects with string keys",
        do="convert the value that the message names",
        page="""Objects are never pickled into a checkpoint. Infinite and NaN numbers are not JSON either.""",
    ),
    CodeInfo(
        code="E718",
        title="The checkpoint has a newer format",
        kind="input",
        why="a newer version may store state that this one does not know",
        needs="a format version that this program reads",
        do="install the version of meshwright that the manifest names",
        page="""manifest.json has a format_version, which is raised when older programs could misread the folder.""",
    ),
    CodeInfo(
        code="E719",
        title="The stored tensors are not those of the model",
        kind="input",
        why="an export with a missing tensor loads with random values in its place",
        needs="every tensor of transformers' model for this config, once, in its shape",
        do="export a checkpoint of a finished save; check that plan.model_config is the model's",
        page="""Names and shapes are compared with those of the transformers model of the same config.
A tied head is not stored: the embedding stands for both, as in files that transformers writes.""",
    ),
    CodeInfo(
        code="E720",
        title="A rewritten checkpoint differs",
        kind="fault",
        why="another layout changes which file a piece lies in, never a bit of a tensor",
        needs="the SHA-256 of every whole tensor as before",
        do="keep the first checkpoint; test the disk and memory of this machine; report the layout",
        page="""meshwright checkpoint reshard reads both checkpoints again after writing and compares every tensor, put
together from its pieces. The first checkpoint is never changed.""",
    ),
    CodeInfo(
        code="W655",
        title="A newer checkpoint is damaged and passed over",
        kind="world",
        why="files of a finished save are missing, cut short or unreadable, so an older state is taken in its place",
        needs="manifest.json and every file in it, of the size it says",
        do="copy the named folder again from where it is whole; or name the folder step-N that is meant",
        page="""inspect, export, merge and reshard take the newest complete checkpoint of a run folder, as resuming does.
Where a newer one is there but not whole, this says so; verify counts it as damage and exits with 1.
Saves that did not finish (their folders begin with a dot) are no damage.""",
    ),
    CodeInfo(
        code="E570",
        title="A loss or gradient is not finite",
        kind="fault",
        why="guards.nonfinite = stop: a NaN or an infinity ends the run at the step in which it arose",
        needs="finite losses and gradients",
        do="look at the named layer and the samples of that step; a smaller rate, or clip.max_norm",
        page="""The step was computed a second time with every block watched; the message names the rank, the block
and the micro-batch in which the first value that is not finite arose: a parameter, an output in forward, or a
gradient in backward.
With guards.nonfinite = skip (the default) such a step is left out on all ranks and the run goes on, up to five
in a row; the origin is in events.jsonl as "not finite".""",
    ),
    CodeInfo(
        code="E571",
        title="Replicas of the parameters differ",
        kind="fault",
        why="ranks that hold the same elements must hold the same bits; one that differs trains another model",
        needs="equal hashes of every replica (guards.replicas_every)",
        do="resume from the last checkpoint without the named rank's device; test its memory",
        page="""Every guards.replicas_every steps each rank hashes its parameters, and the ranks that hold the same
elements compare. The rank that differs from the majority is named; of two replicas both are. A difference without
an error before it is a fault of a memory or of a link (silent corruption), or of a collective. The run stops before
the next checkpoint is written.""",
    ),
    CodeInfo(
        code="E572",
        title="The loss jumped",
        kind="input",
        why="guards.on_spike = stop: a loss far above the usual one ends the run",
        needs="a loss below guards.spike times the median of the last 20",
        do="resume from an earlier checkpoint with a smaller rate, or with guards.on_spike = report",
        page="""A spike is not taken into the median, so a loss that stays high is found again at every step. With
guards.on_spike = report the run goes on and events.jsonl has a "loss spike" for each.""",
    ),
    CodeInfo(
        code="W544",
        title="The loss jumped",
        kind="input",
        why="the loss is above guards.spike times the median of the last 20 steps; the run goes on",
    ),
    CodeInfo(
        code="W545",
        title="A rank is slower than the others",
        kind="world",
        why="every step waits for the slowest rank; its own time (data, forward, backward) is above guards.straggler "
        "times that of the median rank",
    ),
    CodeInfo(
        code="E573",
        title="The proof of a resumed run could not be made",
        kind="fault",
        why="a comparison of two runs needs both of them, with the same tensors",
        needs="a run that can be killed and resumed, and one that is not",
        do="report this with the model's config.json and the layouts",
        page="""meshwright prove --resume runs N + M steps at once, and again with a SIGKILL of all ranks in step N + 1.
The message says which of the two did not come to the point where they can be compared.""",
    ),
    CodeInfo(
        code="E580",
        title="A checkpoint of another program is not whole",
        kind="world",
        why="every rank wrote a part of every tensor; without one rank's file no tensor is whole",
        needs="the files of all ranks of one save",
        do="copy the missing files from where the checkpoint was written, or use another checkpoint",
        page="""DeepSpeed writes one optimizer file per rank (with ZeRO 3 a model file per rank too), torch's distributed
checkpoint the files that its index names, Hugging Face's folders those of model.safetensors.index.json. How many ranks
there were is said in the files. The message names what is missing.""",
    ),
    CodeInfo(
        code="E581",
        title="A checkpoint of another program names more than data",
        kind="input",
        why="a file of torch.save is a pickle, which may call whatever it names; here nothing of it is called",
        needs="tensors, numbers, texts, and objects of the libraries that write checkpoints (those are not built)",
        do="take the checkpoint only from where you trust; delete this one",
        page="""The file is read by an unpickler that imports nothing. Tensors become places in the file; objects of
torch, numpy, deepspeed, transformers, accelerate, megatron and a few modules of Python become inert records. Any
other name ends the reading. The message names it; nothing of it was run.""",
    ),
    CodeInfo(
        code="E582",
        title="A file of a checkpoint of another program cannot be read",
        kind="world",
        why="its bytes are not those that were written, or not all of them are there",
        needs="the file as it was written: a zip archive of torch.save, or shards as long as the index says",
        do="copy it again from where it was written, or use another checkpoint",
        page="""When such a checkpoint is opened, what breaks its structure is found: a file that is too short, a
directory that is damaged, a storage that is smaller than the tensors in it. A changed byte within a tensor is found by
meshwright checkpoint verify, from the CRC-32 that torch.save keeps of every part of its archives (safetensors keeps
none). Files of torch before 1.6 (no zip archive) are not read: load and save them once with a newer torch.""",
    ),
    CodeInfo(
        code="E583",
        title="A DeepSpeed checkpoint with a cut that is not read",
        kind="code",
        why="which part of which tensor a file holds is not said in it, or is said in a way that is not read yet",
        needs="a checkpoint of data parallel ranks (plain, ZeRO 1, 2 or 3)",
        do="convert it to Hugging Face files with the program that wrote it",
        page="""ZeRO's own cut is read. Refused are mp_rank above 0, files per layer (layer_NN...) and files per expert.
Megatron-DeepSpeed's files and those of pipelines and experts hold parts under the names of the model's code, and do not
say along which dim they were cut, nor in which order fused parts (q, k, v; gate and up) lie: two orders give tensors of
the same shape, and only one is the model. DeepSpeed's own tensor parallel training (tensor_parallel.autotp_size)
writes the cut since its universal checkpoints know it: the pieces of every tensor are in universal_checkpoint_info of
mp_rank_XX_model_states.pt. That is not read yet: save_16bit_model of the run that wrote it, or ds_to_universal.py,
makes whole tensors of it. Without that entry a row of the model's own table of cuts would be a guess: DeepSpeed cuts by
the user's partition_config first, by the model's tp_plan next, and by names of modules last.""",
    ),
    CodeInfo(
        code="E584",
        title="The files of a checkpoint are of different saves",
        kind="input",
        why="tensors put together from parts of different steps belong to no model that ever was",
        needs="files of one save: the same step, ZeRO stage, number of ranks and version",
        do="remove what an older save left in the folder, or use another checkpoint",
        page="""Compared are the global step of the model files, the optimizer's step of every rank, the stage, the
number of partitions and the version. The message names two files that differ.""",
    ),
    CodeInfo(
        code="E585",
        title="The parts of a checkpoint do not add up",
        kind="input",
        why="where a tensor lies in the flat partitions follows from the sizes before it; when they do not add up, all "
        "that follow would be read from the wrong place",
        needs="partitions as long as the parameters that they hold, and pieces that make up each tensor",
        do="use another checkpoint; report this one if the program that wrote it can read it",
        page="""ZeRO 1 and 2 keep each group of parameters as one vector, padded by less than two elements per rank;
ZeRO 3 keeps every parameter in equal pieces. A distributed checkpoint's pieces must fill each tensor exactly.""",
    ),
)
