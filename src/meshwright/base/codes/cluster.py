"""Codes about clusters and plans (E4xx)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E401",
        title="The cluster is not known",
        kind="input",
        why="a prediction needs the device's and the links' figures",
        needs="a name from `meshwright clusters`, or a JSON file",
        do="run `meshwright clusters`, or write one with `meshwright probe --out cluster.json`",
        page=(
            "A cluster is named, probed or written by hand.\n"
            "`meshwright clusters` lists the names with the source of every number.\n"
            "`meshwright probe --out cluster.json` measures the machine it runs on.\n"
            "A file by hand needs name, device, gpus_per_node, intra; num_nodes and inter for several nodes."
        ),
    ),
    CodeInfo(
        code="E402",
        title="The number of GPUs cannot be",
        kind="input",
        why="ranks fill whole nodes, or a part of one",
        needs="as many as one node has or fewer, or a multiple of them, at most 1,000,000 GPUs",
        page=(
            "A cluster's name stands for one node. --gpus N takes N / gpus_per_node nodes.\n"
            "N below one node takes a part of it. More than one node must be whole nodes: they are priced as equal.\n"
            "More than one node needs a figure for the network between nodes (E406)."
        ),
    ),
    CodeInfo(
        code="E403",
        title="The cluster file cannot be read",
        kind="input",
        why="a cluster file is one JSON object",
        needs="a JSON object with the keys of a probe or of a hand-written cluster",
        do="see the keys in `meshwright explain E404`",
        page=(
            "The file was found, but it is not JSON, or not an object.\n"
            "Both forms, a probe's output and one by hand, are one JSON object."
        ),
    ),
    CodeInfo(
        code="E404",
        title="A key of the cluster file is unknown, missing or of a wrong kind",
        kind="input",
        why="a key that is not read would be a figure that is silently not used",
        needs=(
            "name, device, gpus_per_node, intra; and, if wanted, num_nodes, inter, source, "
            "price_per_device_hour, notes"
        ),
        do="compare the file with the example in `meshwright explain E404`, or write one with `meshwright probe --out`",
        page=(
            "By hand:\n"
            '{"name": "mine", "gpus_per_node": 8, "num_nodes": 2, "source": "datasheet",\n'
            ' "device": {"name": "X", "memory": "80GB", "peak_flops": {"bf16": 312e12},\n'
            '            "matmul_flops": {"bf16": 250e12}, "memory_rate_bytes_per_s": 2e12, "launch_s": 7e-6},\n'
            ' "intra": {"name": "NVLink", "rate_bytes_per_s": 3e11, "latency_s": 1e-6},\n'
            ' "inter": {"name": "IB", "rate_bytes_per_s": 25e9, "latency_s": 1e-5}}\n'
            "device may be the name of a device of the catalogue; intra and inter may be the name of a link: NVLink 2\n"
            "to 5, PCIe 3 to 5; for adapters that the devices of a node share IB EDR, HDR, NDR or XDR, RoCE 100, 200\n"
            'or 400, EFA (v2 to v4), 10 GbE, 25 GbE or 100 GbE, several of them as "8 x IB NDR".\n'
            "matmul_flops defaults to 0.80 of the peak\n"
            "(said in the prediction's sources), latencies to the catalogue's."
        ),
    ),
    CodeInfo(
        code="E405",
        title="A figure that the prediction needs is not known",
        kind="input",
        why="a number that no source prints is not made up",
        needs="the figure, in a cluster file with its source",
        do="write a cluster file with the figure, or run `meshwright probe` on the machine",
        page=(
            "Time needs the device's matmul rate in the layout's precision and its memory rate.\n"
            "Some devices are in the catalogue with their memory only (no source read prints the rest).\n"
            "Also: a V100 has no bf16, and an fp32 or fp64 peak is not known for every device."
        ),
    ),
    CodeInfo(
        code="E406",
        title="The network between nodes is not known",
        kind="input",
        why="a collective over nodes is paced by that network",
        needs="a figure for the network between nodes",
        do="use GPUs of one node, or write a cluster file with `inter`",
        page=(
            "The cluster is known inside one node only: no source prints the rate between nodes, or the probe\n"
            "ran on one machine. A cluster file with `inter` says it, by name or in figures:\n"
            '{"name": "mine", "device": "L40S-48GB", "gpus_per_node": 8, "num_nodes": 3,\n'
            ' "intra": "PCIe 4", "inter": "2 x 100 GbE"}'
        ),
    ),
    CodeInfo(
        code="E407",
        title="The layout has another number of ranks than the cluster",
        kind="input",
        why="every GPU runs one rank",
        needs="dp * tp * pp * cp equal to the number of GPUs",
        page=(
            "The world size of a layout is dp * tp * pp * cp (ep is borrowed from dp * cp).\n"
            "Give the number of GPUs with --gpus, or change one of these degrees."
        ),
    ),
    CodeInfo(
        code="E408",
        title="A prediction is impossible: more than 100 % of the peak",
        kind="fault",
        why="no device computes faster than its peak",
        needs="a peak (dense, of this precision) that belongs to this device",
        do="check peak_flops and matmul_flops in the cluster file: sparse peaks are twice the dense ones",
        page=(
            "The predicted model FLOP/s would exceed the device's dense peak.\n"
            "A common cause is a matmul rate, or a probe, of another device or precision than the peak."
        ),
    ),
    CodeInfo(
        code="E409",
        title="No layout is legal",
        kind="input",
        why="every way to cut this job over these GPUs breaks a rule",
        needs="a number of GPUs, a batch and a model that some layout divides",
        do="change --gpus, --global-batch, or loosen --fix",
        page=(
            "The search tried every combination of degrees and found none that passes the rules.\n"
            "Usual causes: a global batch smaller than the data-parallel degree, more GPUs than layers x batch,\n"
            "or a --fix that pins degrees whose product is not the number of GPUs."
        ),
    ),
    CodeInfo(
        code="E410",
        title="The search's request cannot be",
        kind="input",
        why="the search needs a size to plan for",
        needs="seq_len >= 1, global_batch >= 1, top >= 1, an objective of time, memory or cost",
        page=(
            "--objective is time (fastest), memory (lowest peak) or cost (fewest device-seconds times price).\n"
            "cost needs a price: price_per_device_hour in the cluster file."
        ),
    ),
    CodeInfo(
        code="W411",
        title="Almost all memory is used",
        kind="cost",
        why="an allocator that fragments, or a batch that is longer, ends the run",
        needs="P(out of memory) of at most 1 %",
        do="lower micro_batch, raise the ZeRO stage, or turn recompute on",
        page=(
            "The predicted peak is below the device's memory, but within the spread of the prediction.\n"
            "A plan is said to fit when its probability of running out of memory is at most 1 %."
        ),
    ),
)
