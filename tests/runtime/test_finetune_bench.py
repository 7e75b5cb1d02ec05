"""What counts as arithmetic when training is compared with the matrix rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.models.registry import ARCHITECTURES
from cotenant.runtime.finetune_workload import flop_per_token


def test_the_usual_count_includes_an_embedding_of_its_own() -> None:
    spec = ARCHITECTURES["llama-3.1-8b"]
    assert flop_per_token(spec) == pytest.approx(32.1e9, rel=1e-3)
    assert flop_per_token(spec, only_multiplied=True) == pytest.approx(30.0e9, rel=1e-3)
    tied = replace(spec, tie_word_embeddings=True)
    assert (
        flop_per_token(tied) == flop_per_token(tied, only_multiplied=True) == flop_per_token(spec, only_multiplied=True)
    )
