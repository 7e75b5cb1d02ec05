"""What the host does for the GPU's runner, where there is no GPU: see runner_on_cpu.py."""

from __future__ import annotations

from engine.conftest import SmallModel
from engine.script_runs import FOLDER, run_script


def test_batches_of_all_kinds_give_what_each_request_gives_alone(small: SmallModel) -> None:
    """And at the start kernels are compiled for batches of every size, captured or not, and for short prompts: the
    first of its size would else keep all requests waiting for its compilers."""
    printed = run_script(FOLDER / "runner_on_cpu.py", small.folder)
    assert printed.count("requests agree") == 9
    assert "steps of [1, 2, 10, 17] rows are compiled, [2] captured" in printed
    assert "steps of [1, 2, 10, 17] rows are compiled, [] captured" in printed
    # Products are cut otherwise from 17 and from 33 rows on; with 20 tokens in a batch, or 8, there are none of 33.
    wanted = {
        (1, 8): (1, 2),
        (8, 20): (1, 2, 8, 16, 17),
        (20, 8192): (1, 2, 16, 17, 20, 33),
        (256, 8192): (1, 2, 16, 17, 33, 256),
        (2000, 8192): (1, 2, 16, 17, 33, 1024),
    }
    for (num_seqs, num_tokens), sizes in wanted.items():
        assert f"of {num_seqs} sequences and {num_tokens} tokens at most, {sizes} rows are compiled" in printed
