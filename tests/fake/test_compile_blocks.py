"""Compiled blocks on their own: every block really runs compiled, without a break, however many there are."""

from __future__ import annotations

import torch
import torch._dynamo as dynamo

from meshwright.parallel.build import build_model
from meshwright.parallel.compiled import compile_blocks, missing_compiler

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 31,
    "max_position_embeddings": 32,
}


def test_twenty_blocks_all_run_compiled(monkeypatch) -> None:
    """More blocks than torch's limit of recompilations (8), past which it would run the rest uncompiled in silence."""
    dynamo.reset()
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        def run(*args):
            runs.append(len(graph.graph.nodes))
            return graph.forward(*args)

        return run

    model = build_model(CONFIG, seed=0, dtype=torch.float64).eval()
    tokens = torch.arange(16).view(2, 8) % 31
    with torch.no_grad():
        want = model(input_ids=tokens, use_cache=False).logits
    compile_blocks(model.model.layers, backend)
    for _ in range(2):
        runs.clear()
        got = model(input_ids=tokens, use_cache=False).logits
        assert torch.equal(got, want)
        assert len(runs) == 20, runs  # one graph per block and pass: no break, no block left out
    got.sum().backward()
    dynamo.reset()


def test_a_machine_without_a_compiler_is_told(monkeypatch) -> None:
    monkeypatch.setattr("meshwright.parallel.compiled.shutil.which", lambda name: None)
    assert [p.code for p in missing_compiler("cpu")] == ["E279"]
    assert missing_compiler("cuda") == []
