"""The child process that validates and tokenises training files: ``python -m cotenant.api.jobs.prepare_main``.

It reads one ``Task`` as a line of JSON from standard input, which its parent then keeps open: when that ends, the
parent is gone, and so should the child be. It answers with one ``Reply`` on standard output. Signals that tell the
whole server to end are its parent's to handle.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress

import msgspec

from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.job import SUPERVISED
from cotenant.text.prepared_file import PreparedFile

logger = logging.getLogger(__name__)

# Requests come first on cores that are shared with them.
_NICENESS = 10


class FileTask(msgspec.Struct, frozen=True):
    """One file: read ``source``, write ``target``."""

    source: str
    target: str
    param: str
    min_examples: int


class Task(msgspec.Struct, frozen=True):
    """What a child does. ``model_folder`` None: a byte tokenizer for ``vocab_size``. ``max_length``: tokens; None: any.
    ``method``: the job's, which decides what an example looks like. ``cut_length``: the tokens of an example that the
    job will train on, where it cuts."""

    files: tuple[FileTask, ...]
    model_folder: str | None
    chat_template: str | None
    vocab_size: int
    max_length: int | None
    method: str = SUPERVISED
    cut_length: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why there are no examples. ``kind``: 'input', what is wrong with a file; 'system', with ``errno``; 'internal'."""

    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    errno: int | None = None


class Reply(msgspec.Struct, frozen=True):
    """What the files hold, in the order of the task, or why there is nothing."""

    files: tuple[PreparedFile, ...] = ()
    failure: Failure | None = None


def run(task: Task) -> Reply:
    """The child's work. Every error becomes a reply; one that is nobody's fault but ours is logged."""
    try:
        return Reply(tuple(_prepare_file(task, file) for file in task.files))
    except CotenantError as error:
        kind = "input" if isinstance(error, InvalidInputError) else "internal"
        return Reply(failure=Failure(kind, error.message, error.code, error.param))
    except OSError as error:
        return Reply(failure=Failure("system", error.strerror or str(error), errno=error.errno))
    except Exception as error:
        logger.exception("the files could not be validated")
        return Reply(failure=Failure("internal", f"The files could not be validated ({type(error).__name__})."))


def _prepare_file(task: Task, file: FileTask) -> PreparedFile:
    # Here and not above: the server, which reads this file for the messages, needs nothing that encodes.
    from cotenant.text.validation import prepare_training_file

    return prepare_training_file(
        file.source,
        file.target,
        task.model_folder,
        task.chat_template,
        task.vocab_size,
        task.max_length,
        min_examples=file.min_examples,
        param=file.param,
        method=task.method,
        cut_length=task.cut_length,
    )


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> None:
    """The child process. Exit code 1: its parent is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with suppress(OSError):
        os.nice(_NICENESS)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(1)
    task = msgspec.json.decode(line, type=Task)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    reply = msgspec.json.encode(run(task))
    try:
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    main()
