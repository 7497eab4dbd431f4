"""Our case among the peers: the shared tiny Llama, its tokens and its clock.

    python ours.py --layout "dp=2,zero=1" --via engine     # transformers' Llama with the shared weights, our engine
    python ours.py --layout "dp=2,zero=3" --via loop       # the shared module itself, in a user's own loop

Reads BENCH_HERE (the folder of ``common.py``), BENCH_CONFIG and BENCH_OUT as every peer does. What a rank runs is in
``ours_rank.py``: the launcher imports it, with torch, before it forks the ranks.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from typing import Any

sys.path.insert(0, os.environ["BENCH_HERE"])

from meshwright.layout.parse import parse_layout
from meshwright.mesh.env import RankFacts
from meshwright.mesh.imports import MODEL_CODE, load_modules
from meshwright.mesh.launch import run_local

MODULES = {
    "engine": (*MODEL_CODE, "transformers.models.llama.modeling_llama", "ours_rank"),
    "loop": ("ours_rank", "meshwright.parallel.module"),
}
"""What the ranks import before they are forked."""


def on_rank(facts: RankFacts, args: Any) -> None:
    """Run this rank."""
    import ours_rank

    ours_rank.on_rank(facts, args)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--via", choices=("engine", "loop"), default="engine")
    parser.add_argument("--matmul", choices=("machine", "torch"), default="machine")
    args = parser.parse_args()
    load_modules(MODULES[args.via])
    args.rss_imports_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run_local(on_rank, parse_layout(args.layout).world_size, args, preload=MODULES[args.via])


if __name__ == "__main__":
    main()
