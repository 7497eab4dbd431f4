"""Every test of this folder runs ranks: mark it so; and leave most cases of parametrized proofs to ``make test-all``."""

from __future__ import annotations

from pathlib import Path

import pytest

KEPT_OF = 5
"""Of the cases of a parametrized proof ``make test`` runs the first of every five, ``make test-all`` all of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gloo)
        proof = item.path.name.startswith("test_prove_") and hasattr(item, "callspec")
        if not proof or item.get_closest_marker("slow") is not None:
            continue
        key = (item.path.name, item.name.partition("[")[0])
        number = seen[key] = seen.get(key, -1) + 1
        if number % KEPT_OF:
            item.add_marker(pytest.mark.slow)
