"""The entry point, of ``python -m meshwright`` and of the console script: it imports next to nothing by itself."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; Ctrl-C is answered in one line from the first moment, also while the program is loaded."""
    try:
        from meshwright.cli.main import main as command_line
    except KeyboardInterrupt:  # before the program can catch it itself
        print("meshwright: interrupted", file=sys.stderr)
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
