"""``python -m cotenant`` is the ``cotenant`` command."""

from __future__ import annotations

import sys

_INTERRUPTED_EXIT_CODE = 130  # of shells, for Ctrl-C


def main() -> None:
    """Run the command line, whatever there is of it when Ctrl-C comes: importing it takes a moment."""
    try:
        from cotenant.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
