"""``python -m meshwright`` is the same program as ``meshwright``."""

from __future__ import annotations

import sys

try:
    from meshwright.cli.main import main
except KeyboardInterrupt:  # before the program can catch it itself
    print("meshwright: interrupted", file=sys.stderr)
    sys.exit(130)

main()
