"""``python -m cotenant`` is the ``cotenant`` command."""

from __future__ import annotations

import sys

from cotenant.cli.interruption import INTERRUPTED_EXIT_CODE


def main() -> None:
    """Run the command line, whatever there is of it when Ctrl-C comes: importing it takes a moment."""
    try:
        from cotenant.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
