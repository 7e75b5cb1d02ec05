"""``cotenant model``: which models can be named, and where they lie."""

from __future__ import annotations

from typing import Annotated

import typer

from cotenant.cli.tables import open_console, print_rows
from cotenant.models.registry import ARCHITECTURES, BUILT_IN, model_path

_SIZES = ("layers", "hidden", "vocabulary", "context")

model_app = typer.Typer(help="The models that can be named instead of a folder.", no_args_is_help=True)


@model_app.command("path")
def path(name: Annotated[str, typer.Argument(metavar="NAME", help="A built-in model.", show_default=False)]) -> None:
    """Print the folder of a built-in model, a Hugging Face checkpoint."""
    typer.echo(model_path(name))


@model_app.command("list", short_help="List the models and architectures.")
def list_models() -> None:
    """List built-in models, and the architectures that --load-format dummy knows."""
    rows = [dict.fromkeys(_SIZES, "") | {"model": name, "kind": "built in"} for name in BUILT_IN]
    for name, spec in ARCHITECTURES.items():
        sizes = (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_position_embeddings)
        shown = dict(zip(_SIZES, (f"{size:,}" for size in sizes), strict=True))
        rows.append({"model": name, "kind": "random weights", **shown})
    print_rows(open_console(), ("model", "kind", *_SIZES), rows, dropped_first=(*_SIZES[::-1], "kind"))
