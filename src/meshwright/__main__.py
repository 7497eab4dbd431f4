"""``python -m meshwright`` is the same program as ``meshwright``."""

from __future__ import annotations

from meshwright.cli.main import main

main()
