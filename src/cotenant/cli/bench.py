"""``cotenant bench``: measurements of a running server, and of its parts by themselves."""

from __future__ import annotations

import typer

from cotenant.cli.bench_colocate import colocate
from cotenant.cli.bench_colocate_report import colocate_report
from cotenant.cli.bench_engine import engine
from cotenant.cli.bench_finetune import finetune
from cotenant.cli.bench_serve import serve

bench_app = typer.Typer(help="Measure a server, or the engine or training by itself.", no_args_is_help=True)
bench_app.command(short_help="Decode steps and prompts, without a server.")(engine)
bench_app.command(short_help="Training by itself.")(finetune)
bench_app.command(short_help="Policies: training beside a load of requests.")(colocate)
bench_app.command(short_help="Compare policies by what was measured before.")(colocate_report)
bench_app.command(short_help="Any server with OpenAI's API, under a load.")(serve)
