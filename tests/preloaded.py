"""What the processes of ``forked`` have imported. It is set aside: none of them walks it when it collects garbage."""
# ruff: noqa: F401

from __future__ import annotations

from cotenant.processes import importing

with importing():
    import cotenant.bench.serve
    import cotenant.cli.main
    import cotenant.runtime.colocate_bench
    import cotenant.runtime.engine_bench
    import cotenant.runtime.finetune_bench
    import finetune.run_job
