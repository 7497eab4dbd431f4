"""The catalogue: every number has a source, and what no source prints is not there."""

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.cluster import catalogue
from meshwright.cluster.load import read_cluster

NAMES = [e.name for e in catalogue.entries()]


def test_names_are_unique_and_those_promised_are_there():
    assert len(set(NAMES)) == len(NAMES)
    promised = {
        "a100-40gb-x8", "a100-80gb-x8", "h100-x8", "h200-x8", "b200-x8", "gb200-nvl72", "v100-32gb-x8", "rtx-4090-x8",
        "rtx-3090-x8", "l40s-x8", "mi300x-x8", "h20-x8", "h800-x8", "a800-x8", "ascend-910b-x8", "aws-p4d", "aws-p5",
        "azure-ndm-a100-v4", "tencent-gn10xp", "gcp-a3-mega", "alibaba-gn7i-8xlarge", "alibaba-lingjun",
    }  # fmt: skip
    assert promised <= set(NAMES)


def test_every_figure_has_a_source_and_a_kind():
    for row in catalogue.describe_clusters():
        for name, figure in row["figures"].items():
            assert figure["source"], (row["name"], name)
            assert figure["kind"] in ("datasheet", "measured", "fitted", "assumed"), (row["name"], name)
            assert figure["value"] > 0
            if figure["kind"] == "assumed":
                assert "assumed" in figure["source"] or name == "launch", (row["name"], name)


def test_a100_figures_are_those_of_the_table():
    spec = read_cluster("a100-40gb-x8")
    assert (spec.num_gpus, spec.device.memory.value) == (8, 39.50 * 2**30)
    assert spec.device.peak_flops["bf16"].value == 312e12
    assert spec.device.memory_rate.value == 1600e9
    assert spec.intra.rate.value == 300e9
    assert spec.inter is not None
    assert (spec.inter.rate.value, spec.inter.rate.kind) == (25e9, "assumed")


def test_an_instance_has_its_own_network():
    p4d = read_cluster("aws-p4d", 16)
    assert p4d.inter is not None
    assert (p4d.num_nodes, p4d.inter.rate.value, p4d.inter.rate.kind) == (2, 6.25e9, "datasheet")


def test_a_v100_has_no_bf16_and_an_ascend_no_peak():
    assert "bf16" not in read_cluster("v100-32gb-x8").device.peak_flops
    assert read_cluster("v100-32gb-x8").device.peak_flops["fp16"].value == 125e12
    assert not read_cluster("ascend-910b-x8").device.peak_flops


def test_a_cluster_without_figures_is_listed_and_refused():
    row = next(r for r in catalogue.describe_clusters() if r["name"] == "alibaba-lingjun")
    assert row["figures"] == {}
    with pytest.raises(MeshwrightError) as error:
        read_cluster("alibaba-lingjun")
    assert error.value.problems[0].code == "E405"


@pytest.mark.parametrize("name", [e.name for e in catalogue.entries() if e.gpu is not None])
def test_every_named_cluster_is_read(name: str):
    spec = read_cluster(name)
    assert spec.num_nodes == 1
    assert spec.num_gpus == spec.gpus_per_node
    assert spec.device.memory.value >= 16e9
    assert spec.intra.rate.value > 0


def test_an_unknown_device_is_a_key_error():
    with pytest.raises(KeyError):
        catalogue.device("GTX-9999")


@pytest.mark.parametrize(
    ("name", "gib", "device"),
    [
        ("NVIDIA H200", 140, "H200-SXM-141GB"),
        ("NVIDIA H100 80GB HBM3", 80, "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", 80, "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB-SXM4"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80GB-SXM4"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX-4090"),
        ("NVIDIA L40S", 45, "L40S-48GB"),
        ("NVIDIA L4", 22, "L4-24GB"),
        ("cpu", 1, None),
        ("NVIDIA Unheard-of", 80, None),
    ],
)
def test_a_driver_s_name_finds_the_device(name: str, gib: int, device: str | None) -> None:
    assert catalogue.named_by_driver(name, gib * 2**30) == device


def test_memory_is_what_torch_prints_as_total_and_the_printed_size_else():
    """An "80 GB" card has 80 GiB, of which the driver keeps about 1 %; a 180 GB one is taken as printed."""
    for gpu in ("A100-80GB-SXM4", "A100-80GB-PCIe", "A800-80GB-SXM", "H100-SXM5-80GB", "H800-SXM"):
        memory = catalogue.device(gpu).memory
        assert 79.0 * 2**30 < memory.value < 79.6 * 2**30
        assert "torch" in memory.source or memory.kind == "assumed"
    assert catalogue.device("B200-SXM-180GB").memory.value == 180e9
    for gpu in catalogue.device_names():
        memory = catalogue.capacity(gpu)
        printed = catalogue.device_rows().get(gpu, {}).get("memory_gb")
        if memory is not None and printed:
            assert 0.90 < memory.value / (float(printed) * 2**30) < 1.0, gpu
