"""Plan: layout + schedule + prediction, and the facts that made them; the file ``plan.json``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.records import Prediction
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.model.adapters import adapted, adapter_to_dict
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import AdapterSpec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Exactly what will run. Its hash covers everything that changes the work, not the prediction.

    Attributes:
        model_name: what the user called the model.
        model_config: its ``config.json`` content (the text model's).
        model_path: folder or file it was read from, or a catalogue name.
        layout: resolved; ``cut`` is written as layers per stage.
        batch: batch arithmetic.
        schedule_text: compute rows, one line per pipeline rank (a single row when pp = 1).
        cluster: name of the cluster the prediction is for ("" when none).
        prediction: what the cost model says, or None.
        why: sentences, best reason first.
        binds: "memory", "compute", "bubble", or a link's name.
        frozen: name patterns of parameters that do not train.
        adapter: low-rank adapters that train in place of the model's own parameters, or None.
    """

    model_name: str
    model_path: str
    model_config: dict[str, Any]
    layout: Layout
    batch: Batch
    schedule_text: str
    cluster: str = ""
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    binds: str = ""
    frozen: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    adapter: AdapterSpec | None = None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.layout.world_size

    @property
    def hash(self) -> str:
        """First 16 hex digits of SHA-256 over model config, layout, batch, schedule, frozen patterns and adapter."""
        facts: dict[str, Any] = {
            "model_config": self.model_config,
            "layout": self.layout.as_dict(),
            "batch": [
                self.batch.global_batch,
                self.batch.micro_batch,
                self.batch.accumulation,
                self.batch.dp,
                self.batch.seq_len,
            ],
            "schedule": self.schedule_text,
            "frozen": list(self.frozen),
        }
        if self.adapter is not None:
            facts["adapter"] = adapter_to_dict(self.adapter)
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_spec(plan: Plan) -> ModelSpec:
    """Return the model that a plan trains, with its adapter's tensors.

    Raises:
        MeshwrightError: what is wrong with the config in the plan.
    """
    return adapted(spec_from_config(plan.model_config, plan.model_name, plan.model_path), plan.adapter)
