"""What a step costs in money, and on how many devices it costs least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import MeshwrightError
from meshwright.base.units import format_seconds
from meshwright.cluster.load import with_gpus
from meshwright.cluster.spec import ClusterSpec
from meshwright.model.spec import ModelSpec
from meshwright.search.search import search


def price_of(step_time_s: float, num_gpus: int, cluster: ClusterSpec) -> float | None:
    """Return what ``num_gpus`` devices cost for a step, in the unit of the cluster's price; None without a price."""
    hour = cluster.price_per_device_hour
    return None if hour is None else hour.value * num_gpus * step_time_s / 3600.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """The fastest plan on so many devices: seconds and money of a step; both None where nothing fits."""

    num_gpus: int
    step_time_s: float | None
    price: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"gpus": self.num_gpus, "step_time_s": self.step_time_s, "price_per_step": self.price}


def sizes(
    spec: ModelSpec, cluster: ClusterSpec, seq_len: int, global_batch: int, **options: Any
) -> tuple[Size, ...]:
    """Return the whole cluster, half of its nodes and so on down to one, the cheapest first; ``options`` of ``search``.

    Raises:
        MeshwrightError: what ``search`` raises on the whole cluster.
    """
    out: list[Size] = []
    nodes = cluster.num_nodes
    while nodes:
        gpus = nodes * cluster.gpus_per_node
        try:
            part = cluster if nodes == cluster.num_nodes else with_gpus(cluster, gpus)
            found = search(spec, part, seq_len, global_batch, top=1, **options).plans
        except MeshwrightError:  # no layout of so many devices is legal
            if nodes == cluster.num_nodes:
                raise
            found = ()
        step = found[0].prediction.step_time_s if found and found[0].prediction is not None else None
        out.append(
            Size(
                num_gpus=gpus, step_time_s=step, price=None if step is None else price_of(step, gpus, cluster)
            )
        )
        nodes //= 2
    return tuple(sorted(out, key=lambda s: (s.price is None, s.price or 0.0, -s.num_gpus)))


def price_sentence(found: tuple[Size, ...]) -> str:
    """Return what a step costs on each number of devices, the cheapest first."""
    parts = [
        f"{s.num_gpus} GPUs: nothing fits"
        if s.step_time_s is None or s.price is None
        else f"{s.num_gpus} GPUs: {s.price:.3g} ({format_seconds(s.step_time_s)})"
        for s in found
    ]
    return f"Price of a step by the hour of its devices, cheapest first: {'; '.join(parts)}."
