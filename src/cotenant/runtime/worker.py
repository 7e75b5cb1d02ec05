"""The worker process: `python -m cotenant.runtime.worker --address … --config …`, or `… --wait`."""

from __future__ import annotations

import sys

from cotenant.processes import importing

START_FAILED_EXIT_CODE = 2


def main() -> int:
    """Run a worker until it is drained. Exit code 2: it could not start, and said why in ``StartFailed``."""
    with importing():
        from cotenant.runtime.worker_process import load_worker
    worker = load_worker()
    return START_FAILED_EXIT_CODE if worker is None else worker.run()


if __name__ == "__main__":
    sys.exit(main())
