"""What every test folder shares: the long-lived pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: forked ranks share few cores

if TYPE_CHECKING:
    from meshwright.mesh.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Give the session's pool of up to eight gloo ranks; ``pool.run(fn, nproc, ...)`` returns results by rank."""
    from meshwright.mesh.pool import RankPool

    with RankPool(max_workers=8) as ranks:
        yield ranks
