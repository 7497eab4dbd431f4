"""The report page: every section, honest about what is missing, safe against hostile text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.base.records import Measurement, MemoryBytes, Prediction, RankRecord, TimeSeconds, errors_pct
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.precision import precision_table
from meshwright.model.read_hf import read_model
from meshwright.model.spec import Role
from meshwright.program.explain import explain_rank
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_to_dict, save_plan
from meshwright.program.tensor_classes import CLASSES, tensor_classes
from meshwright.report.derived import derive_plan
from meshwright.report.glossary import TERMS, terms_in
from meshwright.report.page import island, write_report
from meshwright.report.source import RUN_FILES
from meshwright.schedule.generate import generate

EVIL = '</script><script>alert("x")</script>\u2028<img src=x onerror=y>'
MODEL = Path(__file__).parents[2] / "recipes" / "models" / "tiny-llama" / "config.json"
STEPS = 30


def make_plan(layout: Layout, *, accumulation: int = 4, name: str = "tiny-llama", cluster: str = "") -> Plan:
    ranks = tuple(
        RankRecord(rank=r, stage=r * layout.pp // layout.world_size, memory=memory(r, 1.0))
        for r in range(layout.world_size)
    )
    prediction = Prediction(
        step_time_s=0.9,
        tokens_per_s_per_gpu=1000.0,
        model_tflops_per_gpu=0.01,
        mfu_pct=None,
        flops_convention="causal",
        bubble_share_of_total=0.2,
        memory=ranks[0].memory,
        time=TimeSeconds(compute=0.6, data=0.1, bubble=0.15, optimizer=0.05),
        ranks=ranks,
        step_time_low_s=0.8,
        step_time_high_s=1.1,
        oom_probability=0.0,
        hidden_s={"data": 0.04},
    )
    return Plan(
        model_name=name,
        model_path="recipes/models/tiny-llama",
        model_config=json.loads(MODEL.read_text()),
        layout=layout,
        batch=Batch(
            global_batch=layout.dp * layout.micro_batch * accumulation,
            micro_batch=layout.micro_batch,
            accumulation=accumulation,
            dp=layout.dp,
            seq_len=128,
        ),
        schedule_text=generate(layout.schedule, layout.pp, accumulation).text(),
        cluster=cluster,
        prediction=prediction,
        why=("ZeRO-3 keeps a part of the state on each rank.",),
        binds="compute",
    )


def memory(rank: int, factor: float) -> MemoryBytes:
    return MemoryBytes(
        parameters=int(9e6 * factor),
        gradients=int(9e6 * factor),
        optimizer=int(18e6 * factor),
        activations=int((40e6 - 1e6 * rank) * factor),
        working=int(4e6 * factor),
    )


LAYOUT = Layout(dp=2, zero=3, shard=2, pp=2, cut="3/3", micro_batch=2, precision="fp32")


def make_run(folder: Path, plan: Plan | None = None, *, log: str = "hello") -> Path:
    """Write a small run folder as `meshwright train`, `prove` and `probe` write theirs."""
    plan = plan or make_plan(LAYOUT)
    folder.mkdir(parents=True, exist_ok=True)
    assert plan.prediction is not None
    measurement = Measurement(
        step_time_s=1.0,
        tokens_per_s_per_gpu=900.0,
        model_tflops_per_gpu=0.009,
        mfu_pct=None,
        flops_convention="causal",
        bubble_share_of_total=None,
        memory=memory(0, 1.1),
        time=TimeSeconds(compute=0.85, data=0.05, optimizer=0.06, other=0.04),
        ranks=tuple(replace(r, memory=memory(r.rank, 1.1)) for r in plan.prediction.ranks),
        steps=STEPS,
    )
    run = {
        "meshwright": "0.1.0",
        "plan": plan_to_dict(plan),
        "plan_hash": plan.hash,
        "resolved": {"optimizer": {"lr": 0.0006, "betas": [0.9, 0.95]}, "run": {"dir": "runs/demo"}},
        "origins": {"optimizer.lr": "recipes/demo.yaml", "run.dir": "--set"},
        "versions": {"meshwright": "0.1.0", "torch": "2.13.0"},
        "precision_table": precision_table(plan.layout).rows(),
        "prediction": plan.prediction.as_dict(),
        "measurement": measurement.as_dict(),
        "errors_pct": errors_pct(plan.prediction, measurement),
    }
    (folder / "run.json").write_text(json.dumps(run))
    rows = [
        {
            "step": s,
            "loss": 6.0 - 0.1 * s,
            "grad_norm": 2.0 / s,
            "lr": 1e-4 * s,
            "tokens": 2048,
            "valid_tokens": 2000,
            "step_time_s": 1.0,
            "tokens_per_s": 2048.0,
            "memory_bytes": {"parameters": 9e6, "peak": 9e7},
            "phases_s": {"data": 0.01, "forward_backward": 0.85, "reduce": 0.02, "optimizer": 0.07},
        }
        | ({"eval_loss": 6.2 - 0.1 * s} if s % 10 == 0 else {})
        for s in range(1, STEPS + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    events = [
        {"time": 1767000000.0, "event": "started", "ranks": 4},
        {"time": "later", "event": "log", "line": log},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    line = {"kind": "all_gather", "axis": "dp_shard", "count": 24, "num_bytes": 2**20}
    prove = {
        "passed": True,
        "world_size": plan.world_size,
        "steps": 3,
        "loss": {"max_abs_diff": 3e-15},
        "gradients": {
            "max_rel_diff": 2.1e-12,
            "worst": {"tensor": "model.layers.1.mlp.down_proj.weight", "step": 2, "rel_diff": 2.1e-12},
            "missing": [],
        },
        "grad_norm": {"max_rel_diff": 4e-14},
        "weights": {
            "max_rel_diff": 8e-13,
            "worst": {"tensor": "lm_head.weight", "step": 1, "rel_diff": 8e-13},
        },
        "tolerance": {"loss": 1e-10, "gradients": 1e-10, "grad_norm": 1e-10, "weights": 1e-10},
        "sentinel": None,
        "checks": {"gradients": True, "tied_copies_equal": True},
        "ledger": {"matches": True, "rank": 0, "expected": [line], "recorded": [line]},
        "placement": {"complete": True},
    }
    (folder / "prove.json").write_text(json.dumps(prove))
    points = [
        {"bytes": 2**k, "time_s": 1e-4, "algbw_bytes_per_s": 2**k * 1e4, "busbw_bytes_per_s": 2**k * 1.5e4}
        for k in range(10, 22, 2)
    ]
    probe = {
        "device": "cpu",
        "world_size": 4,
        "backend": "gloo",
        "links": [
            {"ranks": [0, 1, 2, 3], "collective": "all_reduce", "points": points, "latency_s": 1e-4,
             "peak_busbw_bytes_per_s": 1.5e9},
            {"ranks": [0, 1], "collective": "send_recv", "points": points[:2], "latency_s": 9e-5,
             "peak_busbw_bytes_per_s": 1e9},
        ],
        "matmul": [{"precision": "fp32", "m": 512, "k": 512, "n": 512, "time_s": 0.004, "flops_per_s": 6.7e10}],
        "memory": {"total_bytes": 8e9, "available_bytes": 4e8},
        "topology": {},
        "advice": ["4 ranks share 2 cores"],
    }  # fmt: skip
    (folder / "probe.json").write_text(json.dumps(probe))
    return folder


class Page(HTMLParser):
    """What a browser would see: tags with attributes, text by section, script contents."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.style = ""
        self.words: dict[str, list[str]] = {"": []}
        self.section = ""
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "section":
            self.section = dict(attrs).get("id") or ""
            self.words[self.section] = []
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside == "style":
            self.style += data
        else:
            self.words[self.section].append(data)

    def text(self, section: str | None = None) -> str:
        parts = self.words[section] if section is not None else [w for ws in self.words.values() for w in ws]
        return " ".join(" ".join(parts).split())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def page_of(target: Path, out: Path | None = None) -> Page:
    return Page(write_report(str(target), None if out is None else str(out)).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(make_run(tmp_path_factory.mktemp("runs") / "demo"))


def test_the_verdicts_are_the_run_s_own_figures(page: Page) -> None:
    head = page.text("")
    for part in (
        "5.900 → 3.000",
        "held-out 5.200 to 3.200",
        "predicted 900.0 ms, error -10.0 %",
        "error -9.1 %",
        "passed",
        "2.1e-12",
        "model.layers.1.mlp.down_proj.weight",
        "2 048 tokens/s",
        "dp=2,zero=3,pp=2,cut=3/3,micro_batch=2,precision=fp32",
        make_plan(LAYOUT).hash,
        "torch 2.13.0",
    ):
        assert part in head, part


def test_every_section_has_its_content(page: Page) -> None:
    for section, parts in {
        "why": ("ZeRO-3 keeps a part", "compute"),
        "mesh": ("rank 3", "pp1 ds1", "pipeline stage"),
        "timeline": (
            "1f1b on 2 pipeline ranks with 4 micro-batches",
            "of the total",
            "of the ideal",
            "F0",
        ),
        "memory-section": ("rank 3 (stage 1), measured", "optimizer state", "-9.1 %", "capacity 95.37 MiB"),
        "time": (
            "data parallel",
            "80 % band",
            "forward and backward",
            "data 40.0 ms",
            "-5.6 %",
            "- of it bubble",
        ),
        "training": ("Loss", "Gradient norm", "Learning rate", "Throughput", "Peak memory"),
        "parity": (
            "Passed",
            "1.0e-10",
            "lm_head.weight",
            "Ledger of rank 0: expected and recorded collectives agree",
            "1.00 MiB",
        ),
        "link-section": ("all-reduce", "ranks 0, 1, 2, 3", "1.5 GB/s", "67 GFLOP/s", "4 ranks share 2 cores"),
        "precision": ("storage", "fp32"),
        "events": ("2025-12-29", "started", "ranks 4"),
        "settings": ("optimizer.lr", "0.0006", "recipes/demo.yaml", "--set"),
        "words": ("bubble", "ZeRO-3"),
    }.items():
        text = page.text(section)
        for part in parts:
            assert part in text, (section, part)


def test_every_picture_has_a_title_and_a_caption(page: Page) -> None:
    pictures = [a for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    names = [a["aria-labelledby"] for a in pictures]
    assert len(pictures) == 11
    assert len(set(names)) == len(names)
    ids = {a.get("id") for _, a in page.tags}
    assert set(names) <= ids
    assert sum(tag == "figcaption" for tag, _ in page.tags) == len(pictures)


def test_the_page_loads_nothing_and_runs_only_its_own_script(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "base")
        assert not [a for a in attributes if a.startswith("on") or a in ("src", "style", "action")]
        if "href" in attributes:
            assert (attributes["href"] or "").startswith("#")
    assert "url(" not in page.style
    assert "@import" not in page.style
    policy = next(
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for kind, content in (("style", page.style), ("script", page.scripts[1])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_dark_and_print_and_cjk(page: Page) -> None:
    for part in ("prefers-color-scheme:dark", "@media print", "PingFang SC", "tabular-nums"):
        assert part in page.style


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plan = replace(make_plan(LAYOUT, name=EVIL), why=(EVIL,), warnings=(EVIL,), binds=EVIL)
    folder = make_run(tmp_path / "run <b>&", plan, log=EVIL)
    prove = json.loads((folder / "prove.json").read_text())
    prove["gradients"]["worst"] = EVIL
    prove["sentinel"] = {"factor": 2, "cause": EVIL}
    (folder / "prove.json").write_text(json.dumps(prove))
    found = page_of(folder)
    assert len(re.findall("<script", found.html, re.IGNORECASE)) == 2
    assert [t for t, _ in found.tags if t == "img"] == []
    assert EVIL in "".join(found.words[""])
    assert EVIL in "".join(found.words["parity"])
    assert found.data["model"] == EVIL
    raw = found.html[found.html.index('id="report-data"') :]
    assert "\u2028" not in raw[: raw.index("</script>")]


def test_island_is_json_whatever_it_holds() -> None:
    value = {"a": [math.nan, math.inf, 1.5], "b": "</script>\u2028\u2029<!--", "c": {"d": None}}
    text = str(island(value))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": [None, None, 1.5], "b": value["b"], "c": {"d": None}}


@pytest.mark.parametrize(
    ("name", "section", "said"),
    [
        ("run.json", "timeline", "no plan is recorded here"),
        ("metrics.jsonl", "training", "There is no metrics.jsonl"),
        ("events.jsonl", "events", "No event is recorded"),
        ("prove.json", "parity", "Parity was not checked"),
        ("probe.json", "link-section", "The links were not measured"),
    ],
)
def test_a_missing_file_is_said_in_its_section(tmp_path: Path, name: str, section: str, said: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    assert said in page_of(folder).text(section)


@pytest.mark.parametrize("name", ["run.json", "prove.json", "probe.json"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).write_text((folder / name).read_text()[:40])
    found = page_of(folder)
    assert f"{name} is damaged" in found.text("")
    assert "Loss" in found.text("training")


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize(
    "content", ["[1, 2]", "{}", "null", "", '{"plan": 3, "links": 4, "step": "x", "ledger": []}']
)
def test_odd_content_never_breaks_the_page(tmp_path: Path, name: str, content: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(content)
    assert "Parity with one device" in page_of(folder).text()


def test_damaged_and_repeated_lines_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS, "loss": 1.25}) + "\n" + '{"step": 99, "lo\n[1]\n{"loss": 3}\n')
    found = page_of(folder)
    assert "3 damaged lines of metrics.jsonl" in found.text("training")
    assert "1 records were replaced" in found.text("training")
    assert found.data["final_loss"] == 1.25
    assert found.data["damaged_lines"] == {"metrics.jsonl": 3}


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {STEPS + 1}, "loss": NaN}}\n')
    found = page_of(folder)
    assert "The loss of 1 steps is not a finite number" in found.text("training")
    assert found.data["final_loss"] is None


def test_a_failed_proof_is_shown_as_failed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    prove = json.loads((folder / "prove.json").read_text())
    prove["passed"] = False
    prove["gradients"]["missing"] = ["lm_head.weight"]
    prove["sentinel"] = {"factor": 2.0, "cause": "summed over dp"}
    prove["ledger"] = {"matches": False, "expected": prove["ledger"]["expected"], "recorded": []}
    prove["placement"] = {"complete": False}
    prove["checks"]["tied_copies_equal"] = False
    prove["weights"]["max_rel_diff"] = math.inf
    (folder / "prove.json").write_text(json.dumps(prove))
    text = page_of(folder).text("parity")
    for part in (
        "Failed",
        "missing (1): lm_head.weight",
        "factor, 2.0",
        "collectives differ",
        "not held exactly once",
    ):
        assert part in text


def test_the_script_can_rebuild_every_rank_s_text(page: Page) -> None:
    plan = make_plan(LAYOUT)
    spec = derive_plan(read_source_of(plan)).spec
    assert spec is not None
    for rank in range(4):
        rebuilt = "\n".join(page.data["lines"][i] for i in page.data["rank_texts"][str(rank)])
        assert rebuilt == explain_rank(plan, spec, rank)
    assert "rank 0" in page.text("ranks")


def read_source_of(plan: Plan) -> Any:
    from meshwright.report.source import Source

    return Source(path=Path("x"), is_run=False, run={}, plan=plan_to_dict(plan), metrics=(), repeated_steps=0, events=(),
                  prove={}, probe={}, missing=(), unreadable={}, damaged={})  # fmt: skip


def test_a_plan_file_alone(tmp_path: Path) -> None:
    save_plan(make_plan(LAYOUT), tmp_path / "plan.json")
    found = page_of(tmp_path / "plan.json")
    assert (tmp_path / "report.html").is_file()
    assert "plan, not run yet" in found.text("")
    assert "no step has run yet" in found.text("training")
    assert "Nothing was measured yet" in found.text("memory-section")
    assert "predicted" in found.text("")


def test_a_layout_without_a_pipeline_shows_one_rank_s_step(tmp_path: Path) -> None:
    plan = make_plan(Layout(dp=4, zero=3, shard=4, cut="6", precision="bf16"), accumulation=2)
    text = page_of(make_run(tmp_path / "run", plan)).text("timeline")
    for part in ("Rank 0's step in order", "all-gather", "reduce-scatter", "dp_shard", "4 ranks"):
        assert part in text


def test_a_precision_that_the_run_recorded_otherwise_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    assert "other formats" not in page_of(folder).text("precision")
    run["precision_table"][1][1] = "bf16"
    (folder / "run.json").write_text(json.dumps(run))
    assert "compute bf16 (derived: fp32)" in page_of(folder).text("precision")


def test_the_classes_of_tensors_and_their_bytes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    assert "Classes of tensors" not in page_of(folder).text("precision")
    assert set(CLASSES) == set(get_args(Role))  # a new role has a class too
    spec = read_model(str(MODEL.parents[1] / "tiny-qwen3"))
    classes = tensor_classes(spec, parse_layout("dp=2,zero=1,precision=bf16"), ("*norm*",))
    assert sum(c.storage_bytes for c in classes) == 4 * spec.num_parameters
    found = {c.name: c for c in classes}
    assert set(found) == {"embedding", "attention", "feed-forward", "norms"}  # the head is the embedding
    assert (found["norms"].reduction, found["norms"].master, found["norms"].optimizer_bytes) == (
        "none",
        "none",
        0,
    )
    assert found["attention"].optimizer_bytes == 2 * found["attention"].gradient_bytes
    assert (found["attention"].compute, found["embedding"].compute) == ("bf16", "bf16")
    plain = tensor_classes(spec, parse_layout("dp=2,precision=bf16"), (), optimizer_states=0)
    assert [(c.name, c.compute, c.optimizer_bytes) for c in plain if c.name in ("embedding", "norms")] == [
        ("embedding", "fp32", 0),
        ("norms", "fp32", 0),
    ]
    run["tensor_classes"] = [asdict(c) for c in classes]
    (folder / "run.json").write_text(json.dumps(run))
    text = page_of(folder).text("precision")
    assert "Classes of tensors" in text
    assert "feed-forward" in text


def test_one_rank_alone(tmp_path: Path) -> None:
    found = page_of(make_run(tmp_path / "run", make_plan(Layout(cut="6", precision="fp32"), accumulation=2)))
    assert "One rank holds the whole model" in found.text("mesh")


def test_nodes_are_framed_when_the_cluster_is_known(tmp_path: Path) -> None:
    layout = Layout(dp=8, zero=3, shard=8, pp=2, cut="3/3", precision="bf16")
    text = page_of(make_run(tmp_path / "run", make_plan(layout, cluster="a100-40gb-x8"))).text("mesh")
    assert "node 0" in text
    assert "node 1" in text
    assert "8 devices, from cluster a100-40gb-x8" in text


def test_64_ranks_fit_in_400_kb(tmp_path: Path) -> None:
    layout = Layout(dp=16, zero=3, shard=16, pp=4, cut="1/2/2/1", micro_batch=1, precision="bf16")
    folder = make_run(tmp_path / "run", make_plan(layout, accumulation=32))
    path = write_report(str(folder), None)
    assert path.stat().st_size < 400_000
    assert len(Page(path.read_text(encoding="utf-8")).data["rank_texts"]) == 64


def test_out_is_honoured_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    before = sorted(p.name for p in folder.iterdir())
    path = write_report(str(folder), str(tmp_path / "elsewhere.html"))
    assert path == tmp_path / "elsewhere.html"
    assert sorted(p.name for p in folder.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere.html", "run"]


def test_an_old_page_stays_whole_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "report.html").write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(MeshwrightError) as caught:
        write_report(str(folder), None)
    assert caught.value.problems[0].code == "E853"
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert (folder / "report.html").read_text() == "old"
    assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))


def refused(target: Path, out: Path | None = None) -> str:
    with pytest.raises(MeshwrightError) as caught:
        write_report(str(target), None if out is None else str(out))
    return caught.value.problems[0].code


def test_refusals(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent") == "E850"
    assert refused(tmp_path) == "E851"
    for content in ("[]", "not json", '{"model": 1}', ""):
        (tmp_path / "plan.json").write_text(content)
        assert refused(tmp_path / "plan.json") == "E851"
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in RUN_FILES:
        (empty / name).write_text("")
    assert refused(empty) == "E852"
    run = make_run(tmp_path / "run")
    assert refused(run, tmp_path) == "E853"
    assert refused(run, tmp_path / "no" / "such" / "folder.html") == "E853"


def test_a_plan_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    run["plan"]["model_config"] = {"model_type": "unheard-of"}
    (folder / "run.json").write_text(json.dumps(run))
    found = page_of(folder)
    assert "the recorded plan cannot be read" in found.text("timeline")
    assert "rank 3" in found.text("mesh")


def test_glossary_terms_are_unique_and_found_as_words() -> None:
    names = [term for term, _ in TERMS]
    assert len(set(names)) == len(names)
    found = [term for term, _ in terms_in("Two ranks share a bubble; frankly.")]
    assert found == ["rank", "bubble"]
