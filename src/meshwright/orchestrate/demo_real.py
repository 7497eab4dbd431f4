"""``make demo-real``: pretrained weights fine-tuned on two layouts, exported, reloaded with plain transformers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import MeshwrightError
from meshwright.base.units import format_seconds
from meshwright.checkpoint.export import export_hf
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.orchestrate.demo import free_folder, show
from meshwright.orchestrate.proving import write_json
from meshwright.orchestrate.training import train_command
from meshwright.train.data import load_tokenizer

RECIPE = "recipes/demo-real.yaml"
LAYOUTS = ("dp=2,zero=3,precision=fp32", "pp=2,precision=fp32")
PROMPT = "The string method split returns"
NEW_TOKENS = 24


def generate(folder: Path, prompt: str) -> str:
    """Return ``prompt`` continued greedily by the model in ``folder``, loaded with plain transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = torch.tensor([list(tokenizer.encode(prompt))])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_id,
        )
    return " ".join(tokenizer.decode(out[0].tolist()).split())


def demo_real(recipe: str = RECIPE) -> list[dict[str, Any]]:
    """Run both layouts and return what the last screen shows of each."""
    started = time.monotonic()
    base = resolve(load_run(recipe))
    moved = free_folder(Path(base.run.dir))
    if moved is not None:
        show(f"an earlier run was moved to {moved}")
    results: list[dict[str, Any]] = []
    for number, layout in enumerate(LAYOUTS, 1):
        name = layout.split(",precision")[0].replace(",", "-").replace("=", "")
        folder = Path(base.run.dir) / name
        print(f"\n[{number}/{len(LAYOUTS)}] fine-tune {base.model.weights} with {layout}", flush=True)
        run = replace(base, run=replace(base.run, dir=str(folder)))
        begin = time.monotonic()
        result = train_command(run, layout=layout, show=show)
        seconds = time.monotonic() - begin
        checkpoint, _ = latest_checkpoint(folder / "checkpoints")
        assert checkpoint is not None
        exported = export_hf(checkpoint, folder / "hf")
        show(f"exported {exported.get('bytes', 0):,} bytes of safetensors to {folder / 'hf'}")
        line = generate(folder / "hf", PROMPT)
        show(f"reloaded with transformers: {line}")
        results.append(
            {
                "layout": layout,
                "loss_before": result["first_eval_loss"],
                "loss_after": result["eval_loss"],
                "train_loss": result["final_loss"],
                "seconds": seconds,
                "text": line,
                "folder": str(folder),
            }
        )
    write_json(Path(base.run.dir) / "demo-real.json", results)
    print("\nheld-out loss per token, before and after", flush=True)
    for r in results:
        print(
            f"  {r['layout']:<30} {r['loss_before']:.4f} -> {r['loss_after']:.4f}   "
            f"({format_seconds(r['seconds'])})   {r['text']}"
        )
    print(f"demo-real: done in {format_seconds(time.monotonic() - started)}")
    return results


def main() -> int:
    """Run the demo; Returns the exit code: 1 when a layout did not lower the held-out loss."""
    try:
        results = demo_real()
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0 if all(r["loss_after"] < r["loss_before"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
