"""The ``cotenant`` command. Nothing here imports torch, so every command answers at once."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from cotenant import __version__
from cotenant.cli.bench import bench_app
from cotenant.cli.demo import demo
from cotenant.cli.jobs import jobs_app
from cotenant.cli.model import model_app
from cotenant.cli.output import USER_ERROR_EXIT_CODE, drop_output, print_error
from cotenant.cli.profile import profile
from cotenant.cli.serve import serve
from cotenant.core.errors import DISK_FULL, CotenantError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # for what is to be written

app = typer.Typer(
    name="cotenant",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut the names of options
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a language model and fine-tune it at the same time, on one device."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.command(short_help="Serve a model over HTTP, and fine-tune beside it.")(serve)
app.command(short_help="See both at once on the built-in model.")(demo)
app.command(short_help="Measure what the planner wants to know.")(profile)
app.add_typer(bench_app, name="bench")
app.add_typer(jobs_app, name="jobs")
app.add_typer(model_app, name="model")


def main() -> None:
    """Run the command line; what the user did wrong is one line on stderr and exit code 2, a disk that is full one and
    exit code 1, be it under stdout. A reader that has had enough of that, as `head`, hears nothing more."""
    try:
        app()
    except CotenantError as error:
        print_error(error.message)
        sys.exit(1 if error.code == DISK_FULL else USER_ERROR_EXIT_CODE)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        drop_output()
        print_error(f"{error.filename or 'stdout, or another file,'} cannot be written: {error.strerror}")
        sys.exit(1)


if __name__ == "__main__":
    main()
