"""The sampler against transformers' own warpers, and what it promises about seeds and neighbours."""

import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cotenant.core.request import SamplingParams
from cotenant.engine.sampler import NOT_FINITE, sample
from cotenant.engine.sampling_state import SamplingState

torch.set_num_threads(1)

NUM_DRAWS = 6000


def random_logits(vocab_size: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread  # [vocab]


def state(prompt: tuple[int, ...] = (), generated: tuple[int, ...] = (), **params: object) -> SamplingState:
    made = SamplingState(SamplingParams(**params), prompt)  # type: ignore[arg-type]
    for token_id in generated:
        made.observe(token_id)
    return made


def frequencies(logits: torch.Tensor, **params: object) -> torch.Tensor:
    """Observed over many seeds, [vocab]."""
    tokens = sample(logits.repeat(NUM_DRAWS, 1), [state(seed=seed, **params) for seed in range(NUM_DRAWS)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / NUM_DRAWS


FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k_1": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    "top_k_over_vocab": {"top_k": 10_000},
}


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("vocab_size", [40, 600])
def test_distribution_is_that_of_transformers(params: dict[str, float], vocab_size: int) -> None:
    logits = random_logits(vocab_size)
    warpers = LogitsProcessorList()
    if "temperature" in params:
        warpers.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    observed = frequencies(logits, **params)
    assert observed[expected == 0].sum() == 0
    # Five standard deviations of a count; the seeds are fixed, so this cannot flake.
    assert ((observed - expected).abs() <= 5 * (expected * (1 - expected) / NUM_DRAWS).sqrt() + 2 / NUM_DRAWS).all()


def test_top_p_of_a_flat_distribution() -> None:
    logits = random_logits(1000, spread=0.1)
    expected = TopPLogitsWarper(0.9)(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    observed = frequencies(logits, top_p=0.9)
    assert 500 < (expected > 0).sum() < 900
    assert observed[expected == 0].sum() == 0
    tail = logits.argsort(descending=True)[400:]
    assert observed[tail].sum() == pytest.approx(float(expected[tail].sum()), abs=0.03)


def test_a_seeded_row_does_not_depend_on_its_neighbours() -> None:
    vocab_size = 1000
    params = [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_p": 0.95, "temperature": 2.0},
        {"top_k": 7},
        {"top_k": 400, "min_p": 0.001},
        {"temperature": 0.0},
        {"presence_penalty": 1.0},
    ]
    rows = [random_logits(vocab_size, seed=index) for index in range(len(params))]

    def made(index: int) -> SamplingState:
        return state(prompt=(1, 2), generated=(3,), seed=index, **params[index])

    alone = [sample(row[None].clone(), [made(index)])[0] for index, row in enumerate(rows)]
    for order in itertools.islice(itertools.permutations(range(len(params))), 0, 40_000, 4_001):
        for size in (2, 5, len(params)):
            chosen = order[:size]
            together = sample(torch.stack([rows[index] for index in chosen]), [made(index) for index in chosen])
            assert together == [alone[index] for index in chosen]


def test_seeds_repeat_and_differ() -> None:
    logits = random_logits(500)

    def text(seed: int | None) -> list[int]:
        one = state(seed=seed)
        return [sample(logits[None].clone(), [one])[0] for _ in range(20)]

    assert text(7) == text(7)
    assert len({tuple(text(seed)) for seed in (7, -7, 0, 2**63, None)}) == 5
    assert text(None) != text(None)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(50)
    prompt, generated = (3, 9, 9, 40), (9, 11, 40)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + generated]), logits[None].clone())[0]
    adjusted = logits[None].clone()
    sample(adjusted, [state(prompt, generated, repetition_penalty=1.7)])
    torch.testing.assert_close(adjusted[0], expected)


def test_frequency_and_presence_penalties_count_generated_tokens_only() -> None:
    logits = random_logits(50)
    adjusted = torch.stack((logits, logits, logits))
    sample(
        adjusted,
        [
            state((1, 2, 3), (3, 3, 3, 8), frequency_penalty=0.5, presence_penalty=0.25),
            state(temperature=0.0),
            state((1,), (4,), presence_penalty=-2.0, repetition_penalty=1.3),
        ],
    )
    first, second, third = adjusted - logits
    assert first.nonzero().flatten().tolist() == [3, 8]
    assert first[3].item() == pytest.approx(-(3 * 0.5 + 0.25), abs=1e-5)
    assert first[8].item() == pytest.approx(-(0.5 + 0.25), abs=1e-5)
    assert not second.any()
    assert third.nonzero().flatten().tolist() == [1, 4]
    repeated = torch.where(logits > 0, logits / 1.3, logits * 1.3)
    assert adjusted[2, 1].item() == pytest.approx(float(repeated[1]), abs=1e-5)
    assert adjusted[2, 4].item() == pytest.approx(float(repeated[4]) + 2.0, abs=1e-5)


def test_penalties_follow_a_long_generation() -> None:
    one = state(temperature=0.0, presence_penalty=100.0)
    tokens = []
    for _ in range(90):
        (token,) = sample(random_logits(100)[None].clone(), [one])
        one.observe(token)
        tokens.append(token)
    assert tokens == random_logits(100).argsort(descending=True)[:90].tolist()


def test_logit_bias_bans_and_forces_also_when_greedy() -> None:
    logits = random_logits(50)
    best, second = logits.topk(2).indices.tolist()
    states = [
        state(temperature=0.0, logit_bias={best: -100.0}),
        state(temperature=0.0, logit_bias={17: 100.0}),
        state(temperature=1.0, seed=1, logit_bias={17: 100.0}),
        state(temperature=0.0),
    ]
    assert sample(logits.repeat(4, 1), states) == [second, 17, 17, best]


def test_extreme_temperatures() -> None:
    logits = random_logits(50)
    best = int(logits.argmax())
    assert sample(logits.repeat(2, 1), [state(temperature=1e-30), state(temperature=1e-4)]) == [best, best]
    assert sample(logits[None].clone(), [state(temperature=1e30)])[0] != NOT_FINITE


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_named_and_harm_no_other(bad: float) -> None:
    logits = torch.stack([random_logits(300, seed=index) for index in range(6)])
    params = [{}, {"top_p": 0.9}, {"temperature": 0.0}] * 2

    def states() -> list[SamplingState]:
        return [state(seed=index, **params[index]) for index in range(6)]

    expected = sample(logits.clone(), states())
    for row in (0, 4, 5):
        broken = logits.clone()
        broken[row, 123] = bad
        assert sample(broken, states()) == [NOT_FINITE if index == row else expected[index] for index in range(6)]
