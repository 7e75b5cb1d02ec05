"""The worker process: `python -m cotenant.runtime.worker --address … --config …`, or `… --wait`. What it does is in
``worker_process``, which takes seconds to import."""

from __future__ import annotations

import sys

from cotenant.processes import importing

if __name__ == "__main__":
    with importing():
        from cotenant.runtime.worker_process import main
    sys.exit(main())
