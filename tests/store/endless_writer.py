"""A process that writes to a store until it is killed, and says what was confirmed: one line each, after the fact."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from cotenant.store import open_store
from store.rows import add_job, metrics_event


def main() -> None:
    store = open_store(Path(sys.argv[1]))
    print("open", flush=True)
    for number in itertools.count():
        upload = store.files.begin_upload(1 << 20)
        upload.write(f"content {number}\n".encode() * 100)
        file = upload.finish(f"file {number}", "fine-tune")
        print("file", file.id, number, flush=True)
        job = add_job(store)
        print("job", job.id, flush=True)
        for step in range(1, 4):
            store.events.add_metrics(job.id, [metrics_event(step)], step, None)
            print("step", job.id, step, flush=True)


if __name__ == "__main__":
    main()
