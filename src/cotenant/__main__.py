"""``python -m cotenant`` is the ``cotenant`` command."""

from cotenant.cli.main import main

main()
