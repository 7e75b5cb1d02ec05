"""Which jobs with captured layers there is room for, and what is said to be lacking."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from pathlib import Path

import pytest

from cotenant.core.errors import CotenantError
from cotenant.finetune.footprint import state_bytes
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from finetune import support
from finetune.captured_layers import VALIDATION, Make, run_to_end


def test_a_job_is_refused_or_trains(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    """Whatever memory there is, no job is accepted that then waits for ever."""
    outcomes, codes = [], set()
    for kib in range(200, 1400, 100):
        try:
            job = captured(decoder, tmp_path / str(kib), free_bytes=kib << 10, max_steps=1)
        except CotenantError as error:
            codes.add(error.code)
            outcomes.append(False)
            continue
        assert job.runnable
        run_to_end(job)
        outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    assert codes == {"insufficient_memory"}


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_is_said_to_be_lacking_is_enough_and_no_more(
    decoder: Decoder, captured: Make, tmp_path: Path, is_captured: bool
) -> None:
    """With all that the job needs counted, and what is free as it was said to be."""

    def make(name: str, free_bytes: int, validation: support.Examples) -> TrainingJob:
        if is_captured:
            return captured(decoder, tmp_path / name, free_bytes=free_bytes, validation=validation, max_length=250)
        spec = support.make_spec(tmp_path / name, validation=validation, eval_steps=3, max_length=250)
        return support.make_job(decoder, spec, free_bytes=free_bytes)

    undisturbed = make("undisturbed", 1 << 40, VALIDATION)
    state = state_bytes(sum(matrix.numel() for matrix in undisturbed.adapter.parameters()))
    undisturbed.close()
    long = [([5] * 250, [0.0] + [1.0] * 249)]
    for validation, few in itertools.product((VALIDATION, long), (state - 1000, state + 1000)):
        name = f"{len(validation)}-{few}"
        with pytest.raises(CotenantError) as refused:
            make(name, few, validation)
        numbers = re.findall(r"(\d+) (?:bytes|for it|\(\d+ MiB\) are)", refused.value.message)
        needed, free, lacking = map(int, numbers)
        assert (free, needed - free) == (few, lacking)
        if few < state:
            continue  # a bound
        make(f"{name}-enough", few + lacking, validation).close()
        with pytest.raises(CotenantError) as refused:
            make(f"{name}-less", few + lacking - 1, validation)
        assert "so 1 (0 MiB) are lacking" in refused.value.message


def test_a_long_validation_example_has_room_as_well(decoder: Decoder, captured: Make, tmp_path: Path) -> None:
    """In one piece; what fits without it does not."""
    changes = {"max_length": 250, "max_steps": 1}
    long = [([5] * 250, [0.0] + [1.0] * 249)]
    for kib in range(200, 1400, 100):
        with suppress(CotenantError):
            run_to_end(captured(decoder, tmp_path / str(kib), free_bytes=kib << 10, **changes))
            break
    for more_kib, is_refused in ((0, True), (200, True), (1000, False)):
        folder, free_bytes = tmp_path / f"long-{more_kib}", (kib + more_kib) << 10
        if is_refused:
            with pytest.raises(CotenantError, match=r"\(250 in the validation file\)"):
                captured(decoder, folder, free_bytes=free_bytes, validation=long, **changes)
        else:
            run_to_end(captured(decoder, folder, free_bytes=free_bytes, validation=long, **changes))
