"""What is said of batches that have no record: prompts, and batches behind a tasklet that is in flight."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from copy import deepcopy

import pytest
from msgspec.structs import replace

from cotenant.core.plan import BatchShape, IterationRecord, Mode, causal_pairs
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.prior import Prior
from cotenant.predictor.roofline import RATES, ModelSizes, Roofline
from cotenant.predictor.shapes import TILE, batch_key


def true_ms(batch: BatchShape) -> float:
    """As on an H200: attention costs by its pairs, what is cached has to be read, and up to 1,024 rows batches are
    captured and padded to multiples of 256."""
    rows = batch.num_decode + batch.prefill_tokens
    padded = math.ceil(rows / 256) * 256 if rows <= 1024 else rows
    cached = batch.prefill_context_tokens - batch.prefill_tokens
    attention_ms = 2.5 * batch.prefill_pairs / 1e6 + 0.1 * cached / 1e3
    return 5.0 + batch.context_tokens / 30_000 + (0.023 * padded + attention_ms if batch.prefill_tokens else 0.0)


def random_batch(rng: random.Random) -> BatchShape:
    """With the chunk of one prompt of which a part may be cached, and up to two short ones, or without."""
    num_decode = rng.randint(1, 40)
    decodes = BatchShape(num_decode, num_decode * rng.randint(500, 2000))
    if rng.random() > 0.3:
        return decodes
    return with_prompts(decodes, (rng.randint(1, 3000), rng.choice((0, 0, 2048))), *[(500, 0)] * rng.randint(0, 2))


def with_prompts(decodes: BatchShape, *chunks: tuple[int, int]) -> BatchShape:
    """``chunks``: tokens, and those of the same prompt that are cached."""
    return replace(
        decodes,
        prefill_tokens=sum(tokens for tokens, _ in chunks),
        prefill_context_tokens=sum(map(sum, chunks)),
        prefill_pairs=sum(causal_pairs(*chunk) for chunk in chunks),
    )


def error_of(predictor: LatencyPredictor, decodes: BatchShape, *chunks: tuple[int, int]) -> float:
    """Of what is said of a batch, as a share of what it takes."""
    batch = with_prompts(decodes, *chunks)
    predicted_ms = predictor.batch_ms(batch, cautious=False)
    assert predicted_ms is not None
    return abs(predicted_ms / true_ms(batch) - 1)


def learn(predictor: LatencyPredictor, batch: BatchShape, took_ms: float) -> None:
    predictor.observe(IterationRecord(batch, Mode.NONE, took_ms, took_ms))


@pytest.fixture(scope="module")
def predictor() -> LatencyPredictor:
    rng, predictor = random.Random(1), LatencyPredictor("h", "m")
    for _ in range(1500):
        batch = random_batch(rng)
        learn(predictor, batch, true_ms(batch) * rng.uniform(0.98, 1.02))
    return predictor


def test_prompts_that_were_never_run_are_known_to_some_percent(predictor: LatencyPredictor) -> None:
    rng, errors = random.Random(2), []
    while len(errors) < 300:
        batch = random_batch(rng)
        if batch.prefill_tokens < 128:
            continue
        predicted_ms = predictor.batch_ms(batch, cautious=False)
        assert predicted_ms is not None
        errors.append(abs(predicted_ms / true_ms(batch) - 1))
    assert sum(errors) / len(errors) < 0.03
    assert sorted(errors)[int(0.95 * len(errors))] < 0.1


@pytest.mark.parametrize("rows", [256, 520])
def test_chunks_of_one_size_leave_what_is_known_of_others(predictor: LatencyPredictor, rows: int) -> None:
    """As where the target has room for so many tokens beside a step, for minutes."""
    restored, rng = LatencyPredictor("h", "m"), random.Random(6)
    restored.restore(predictor.export())
    for _ in range(400):
        decodes = BatchShape(rng.randint(4, 40), rng.randint(5_000, 50_000))
        batch = with_prompts(decodes, (rows - decodes.num_decode, rng.randint(0, 4000)))
        learn(restored, batch, true_ms(batch) * rng.uniform(0.98, 1.02))
    errors = [error_of(restored, BatchShape(12, 15_000), (tokens, 0)) for tokens in range(64, 3000, 20)]
    assert sum(errors) / len(errors) < 0.03


def test_a_batch_that_fills_its_tiles_is_told_from_one_with_a_row_more(predictor: LatencyPredictor) -> None:
    restored, rng = LatencyPredictor("h", "m"), random.Random(7)
    restored.restore(predictor.export())
    for number in range(200):
        tokens = rng.randint(247, 260) if number % 10 == 0 else 246
        batch = with_prompts(BatchShape(10, rng.randint(5_000, 20_000)), (tokens, 0))
        learn(restored, batch, true_ms(batch) * rng.uniform(0.98, 1.02))
    for tokens in (246, 247, 260):
        assert error_of(restored, BatchShape(10, 12_000), (tokens, 0)) < 0.05


def test_a_part_of_a_tile_costs_as_much_as_a_whole_one_also_where_no_batch_was_of_that_size() -> None:
    def in_tiles_ms(batch: BatchShape) -> float:
        rows = batch.num_decode + batch.prefill_tokens
        return 5.0 + 0.02 * math.ceil(rows / TILE) * TILE

    rng, predictor = random.Random(8), LatencyPredictor("h", "m")
    for _ in range(300):
        tokens = rng.choice((rng.randint(129, 384), rng.randint(769, 1152)))
        batch = with_prompts(BatchShape(), (tokens, 0))
        learn(predictor, batch, in_tiles_ms(batch))
    for tokens in (513, 640, 641):
        batch = with_prompts(BatchShape(), (tokens, 0))
        assert predictor.batch_ms(batch, cautious=False) == pytest.approx(in_tiles_ms(batch), rel=0.02)


def few_rows_ms(batch: BatchShape) -> float:
    """As on an H200 beside training: up to three tiles reading the weights takes longer than computing with them."""
    tiles = math.ceil((batch.num_decode + batch.prefill_tokens) / TILE)
    return 4.5 + batch.context_tokens / 30_000 + TILE * (0.017 * min(tiles, 3) + 0.0225 * max(0, tiles - 3))


@pytest.fixture(scope="module")
def few_rows() -> LatencyPredictor:
    """Has seen batches of a tile, and of three and more."""
    rng, predictor = random.Random(13), LatencyPredictor("h", "m")
    for _ in range(300):
        decodes = BatchShape(rng.randint(4, 40), rng.randint(5_000, 50_000))
        rows = rng.choice((rng.randint(64, TILE), rng.randint(2 * TILE + 1, 2000)))
        for batch in (decodes, with_prompts(decodes, (rows - decodes.num_decode, 0))):
            learn(predictor, batch, few_rows_ms(batch) * rng.uniform(0.98, 1.02))
    return predictor


def test_a_row_more_of_few_costs_less_than_one_of_many(few_rows: LatencyPredictor) -> None:
    for rows in range(TILE + 1, 2 * TILE + 1, 8):
        batch = with_prompts(BatchShape(20, 20_000), (rows - 20, 0))
        assert few_rows.batch_ms(batch, cautious=False) == pytest.approx(few_rows_ms(batch), rel=0.02)


@pytest.mark.parametrize("rows", [256, 384, 512, 768, 1280, 2048])
def test_a_chunk_has_as_many_tokens_as_take_so_long(few_rows: LatencyPredictor, rows: int) -> None:
    """Whatever a token of more or of fewer costs."""
    decodes = BatchShape(20, 20_000)
    batch = with_prompts(decodes, (rows - decodes.num_decode, 0))
    limit_ms = few_rows.batch_ms(batch)
    assert limit_ms is not None
    found = few_rows.prompt_tokens_within(decodes, limit_ms, most=8192)
    assert found == pytest.approx(batch.prefill_tokens, abs=1)


def roofline_prior() -> Prior:
    return Prior(Roofline(ModelSizes(32, 4096, 14336, 32, 8, 128, 128256, 2.0, 2.0), RATES["NVIDIA H200"]))


@pytest.mark.parametrize("rows", [1024, 2048, 4096])
@pytest.mark.parametrize("has_prior", [True, False])
def test_a_chunk_larger_than_any_before_takes_about_as_long_as_it_may(rows: int, has_prior: bool) -> None:
    """Or less: what a line that is led on by noise says of so many tokens is not believed where they would cost less
    than few do."""
    for seed in range(6):
        rng, predictor = random.Random(seed), LatencyPredictor("h", "m", roofline_prior() if has_prior else None)
        for _ in range(300):
            decodes = BatchShape(rng.randint(4, 40), rng.randint(5_000, 50_000))
            for batch in (decodes, with_prompts(decodes, (rng.randint(16, 1024 - decodes.num_decode), 0))):
                learn(predictor, batch, true_ms(batch) * rng.uniform(0.98, 1.02))
        decodes = BatchShape(20, 20_000)
        limit_ms = true_ms(with_prompts(decodes, (rows - decodes.num_decode, 0)))
        found = predictor.prompt_tokens_within(decodes, limit_ms, most=8192)
        assert found is not None
        assert 0.45 < true_ms(with_prompts(decodes, (found, 0))) / limit_ms < 1.2


@pytest.mark.parametrize("rows", [384, 512, 640])
def test_small_chunks_do_not_keep_larger_ones_from_being_tried(rows: int) -> None:
    """Which the roofline is too cautious of."""
    rng, predictor = random.Random(16), LatencyPredictor("h", "m", roofline_prior())
    decodes = BatchShape(20, 20_000)
    for _ in range(100):
        for batch in (decodes, with_prompts(decodes, (rng.randint(32, 340), 0))):
            learn(predictor, batch, few_rows_ms(batch) * rng.uniform(0.98, 1.02))
    limit_ms, in_tiles = few_rows_ms(with_prompts(decodes, (rows - 20, 0))), 0
    for _ in range(20):
        found = predictor.prompt_tokens_within(decodes, limit_ms, most=8192)
        assert found is not None
        in_tiles = (20 + found + TILE // 4) // TILE * TILE
        batch = with_prompts(decodes, (in_tiles - 20, 0))
        learn(predictor, batch, few_rows_ms(batch) * rng.uniform(0.98, 1.02))
    assert in_tiles == rows


def test_prompts_go_by_the_model_not_by_a_record_of_some_about_like_them(predictor: LatencyPredictor) -> None:
    """The last chunks of long prompts, and a whole one in a batch with the decodes and the size of theirs."""
    restored, decodes = LatencyPredictor("h", "m"), BatchShape(8, 10_000)
    restored.restore(predictor.export())
    long, short = ((1400, 2048),), ((400, 2048), (1000, 0))
    for _ in range(10):
        learn(restored, with_prompts(decodes, *long), true_ms(with_prompts(decodes, *long)))
    keys = [batch_key(with_prompts(decodes, *chunks)) for chunks in (long, short)]
    assert keys[0] == keys[1]
    for chunks in (long, short):
        assert error_of(restored, decodes, *chunks) < 0.03


def test_a_batch_that_is_asked_for_again_is_predicted_anew_once_something_was_measured(
    predictor: LatencyPredictor,
) -> None:
    learned, batch = LatencyPredictor("h", "m"), with_prompts(BatchShape(8, 10_000), (700, 0))
    assert learned.batch_ms(batch) is None
    learned.restore(predictor.export())
    before_ms = learned.batch_ms(batch)
    assert before_ms == learned.batch_ms(batch) == pytest.approx(true_ms(batch), rel=0.05)
    for _ in range(10):
        learn(learned, batch, 1.5 * true_ms(batch))
    assert learned.batch_ms(batch) == pytest.approx(1.5 * true_ms(batch), rel=0.05)


@pytest.mark.parametrize(("sizes", "most"), [((246, 502, 758), 0.02), (range(1100, 3000), 0.04)])
def test_prompts_follow_the_clocks_within_some_batches(
    predictor: LatencyPredictor, sizes: Sequence[int], most: float
) -> None:
    """As where training begins, or ends, to share the power: those of sizes that come again, and others."""
    restored, rng, errors = LatencyPredictor("h", "m"), random.Random(10), []
    restored.restore(predictor.export())
    for slower in (1.0, 1.15):
        for number in range(200):
            batch = with_prompts(BatchShape(10, rng.randint(5_000, 20_000)), (rng.choice(sizes), 0))
            predicted_ms = restored.batch_ms(batch, cautious=False)
            assert predicted_ms is not None
            if slower > 1 and 20 <= number < 60:
                errors.append(abs(predicted_ms / (slower * true_ms(batch)) - 1))
            learn(restored, batch, slower * true_ms(batch) * rng.uniform(0.98, 1.02))
    assert sum(errors) / len(errors) < most


def test_what_was_learned_goes_on_after_a_restart(predictor: LatencyPredictor) -> None:
    restored = LatencyPredictor("h", "m")
    restored.restore(predictor.export())
    decodes = BatchShape(7, 9000)
    for batch in (with_prompts(decodes, (600, 0)), with_prompts(decodes, (3000, 2048)), BatchShape(50, 77_777)):
        asked = [each.batch_ms(batch, cautious=False) for each in (predictor, restored)]
        assert asked[0] == pytest.approx(asked[1])


def test_prompts_count_as_decodes_until_some_were_measured() -> None:
    predictor = LatencyPredictor("h", "m")
    for num in range(1, 30):
        learn(predictor, BatchShape(num, 100 * num), 2.0 + 0.1 * num)
    assert predictor.batch_ms(with_prompts(BatchShape(4, 400), (16, 0))) == pytest.approx(2.0 + 0.1 * 20, rel=0.2)


def test_one_stall_leaves_prompts_their_room(predictor: LatencyPredictor) -> None:
    """Some sizes hardly come again, so what is believed of one would stay."""
    restored = LatencyPredictor("h", "m")
    restored.restore(predictor.export())
    decodes = BatchShape(20, 20_000)
    before = restored.prompt_tokens_within(decodes, 45.0, most=8192)
    learn(restored, with_prompts(decodes, (1024, 0)), 400.0)
    after = restored.prompt_tokens_within(decodes, 45.0, most=8192)
    assert before is not None
    assert after is not None
    assert after > 0.7 * before
    stalled = with_prompts(BatchShape(21, 21_000), (1030, 0))
    predicted_ms = restored.batch_ms(stalled, cautious=False)
    assert predicted_ms is not None
    assert predicted_ms < 2 * true_ms(stalled)


@pytest.mark.parametrize("rows", [512, 768, 1024])
def test_as_many_prompt_tokens_fit_as_fill_the_tiles(predictor: LatencyPredictor, rows: int) -> None:
    """A chunk sized by the line through all sizes would be a tile smaller, and prompts slower."""
    restored, rng, decodes = LatencyPredictor("h", "m"), random.Random(9), BatchShape(20, 20_000)
    restored.restore(predictor.export())
    for _ in range(200):
        tokens = rng.choice((rows - 20, rng.randint(100, 1100)))
        learn(restored, with_prompts(decodes, (tokens, 0)), true_ms(with_prompts(decodes, (tokens, 0))))
    limit_ms = true_ms(with_prompts(decodes, (rows - 20, 0)))
    found = restored.prompt_tokens_within(decodes, limit_ms, most=8192)
    assert found is not None
    assert (20 + found + TILE // 4) // TILE * TILE == rows


@pytest.mark.parametrize("limit_ms", [30.0, 60.0, 100.0])
def test_of_a_long_prompt_a_token_costs_more(predictor: LatencyPredictor, limit_ms: float) -> None:
    """Its attention grows with the square."""
    decodes = BatchShape(20, 20_000)
    tokens = predictor.prompt_tokens_within(decodes, limit_ms, most=8192)
    assert tokens is not None
    assert true_ms(with_prompts(decodes, (tokens, 0))) == pytest.approx(limit_ms, rel=0.035)


@pytest.mark.parametrize("num_computed", [1000, 3000])
@pytest.mark.parametrize("limit_ms", [45.0, 60.0, 100.0])
def test_of_a_prompt_that_is_half_done_a_token_costs_more(
    predictor: LatencyPredictor, limit_ms: float, num_computed: int
) -> None:
    """It attends to those before it: sized as a fresh one, a chunk of it would take longer than it may."""
    decodes = BatchShape(20, 20_000)
    tokens = predictor.prompt_tokens_within(decodes, limit_ms, num_computed, most=8192)
    assert tokens is not None
    assert true_ms(with_prompts(decodes, (tokens, num_computed))) == pytest.approx(limit_ms, rel=0.04)


def test_what_was_asked_before_of_other_decodes_makes_chunks_no_longer(predictor: LatencyPredictor) -> None:
    """The search begins where the last one ended, however far that is."""
    rng, fresh = random.Random(17), LatencyPredictor("h", "m")
    fresh.restore(predictor.export())
    asked = deepcopy(fresh)
    beyond: list[list[float]] = [[], []]  # by what share of the limit chunks take longer or, negative, less than that
    for _ in range(80):
        num_decode, num_computed = rng.choice((1, 8, 20, 40)), rng.choice((0, 0, 1000, 3000))
        decodes, unasked = BatchShape(num_decode, num_decode * rng.randint(500, 2000)), deepcopy(fresh)
        for limit_ms in sorted(rng.uniform(20.0, 115.0) for _ in range(2)):
            for each, shares in zip((asked, unasked), beyond, strict=True):
                tokens = each.prompt_tokens_within(decodes, limit_ms, num_computed, most=8192)
                took_ms = predictor.batch_ms(with_prompts(decodes, (tokens or 0, num_computed)))
                assert took_ms is not None
                shares.append(took_ms / limit_ms - 1)
    assert beyond[0] != beyond[1]
    longer, shorter = ([sum(max(0.0, sign * each) for each in shares) for shares in beyond] for sign in (1, -1))
    assert longer[0] < 1.02 * longer[1]
    assert shorter[0] < shorter[1] + 0.002 * len(beyond[0])


def after_training(rng: random.Random, num_since: int) -> float:
    """So many times as long prompts take: the tasklet in flight has some SMs, and clocks are low."""
    return rng.uniform(0.94, 1.06) * (1.1, 1.05, 1.0)[min(num_since, 2)]


def trains(predictor: LatencyPredictor) -> None:
    tasklet = (TaskletRun(TaskletShape(TaskletKind.FORWARD_MLP, 2048, 2048), 1), 1.1)
    predictor.observe(IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 1.1, (tasklet,)))


@pytest.fixture(scope="module")
def trained(predictor: LatencyPredictor) -> LatencyPredictor:
    """The same, having seen prompts right behind training and alone."""
    rng, trained = random.Random(11), LatencyPredictor("h", "m")
    trained.restore(predictor.export())
    for number in range(150):
        trains(trained)
        for num_since in range(1 + number % 4):
            batch = with_prompts(BatchShape(10, rng.randint(5_000, 20_000)), (rng.randint(100, 3000), 0))
            took_ms = true_ms(batch) * after_training(rng, num_since)
            is_disturbed = num_since == 0 and number % 2 == 0
            trained.observe(IterationRecord(batch, Mode.NONE, took_ms, took_ms, is_disturbed=is_disturbed))
    return trained


def test_prompts_are_slower_right_behind_training(trained: LatencyPredictor) -> None:
    rng, restored = random.Random(12), LatencyPredictor("h", "m")
    restored.restore(trained.export())
    errors: list[list[float]] = [[], [], [], []]
    for _ in range(60):
        trains(restored)
        for num_since, found in enumerate(errors):
            batch = with_prompts(BatchShape(10, rng.randint(5_000, 20_000)), (rng.randint(100, 3000), 0))
            took_ms = true_ms(batch) * after_training(rng, num_since)
            predicted_ms = restored.batch_ms(batch, cautious=False)
            assert predicted_ms is not None
            found.append(predicted_ms / took_ms - 1)
            restored.observe(IterationRecord(batch, Mode.NONE, took_ms, took_ms, is_disturbed=num_since == 0))
    assert all(abs(sum(found) / len(found)) < 0.015 for found in errors), errors


@pytest.mark.parametrize("shared", [0.06, 0.0])
def test_what_slows_a_batch_with_prompts_slows_the_one_behind_it(trained: LatencyPredictor, shared: float) -> None:
    """Clocks change between runs of prompts more than within one. Where they do not, next to nothing is lost."""
    rng, restored = random.Random(13), LatencyPredictor("h", "m")
    restored.restore(trained.export())
    errors: list[list[float]] = [[], []]  # of the first batches of runs, and of those behind them
    for _ in range(150):
        trains(restored)
        of_run = rng.choice((1 - shared, 1 + shared))
        for num_since in range(5):
            batch = with_prompts(BatchShape(10, rng.randint(5_000, 20_000)), (rng.randint(100, 3000), 0))
            took_ms = true_ms(batch) * of_run * rng.uniform(0.99, 1.01) * (1.1, 1.05, 1.0)[min(num_since, 2)]
            predicted_ms = restored.batch_ms(batch, cautious=False)
            assert predicted_ms is not None
            errors[num_since > 0].append(abs(predicted_ms / took_ms - 1))
            restored.observe(IterationRecord(batch, Mode.NONE, took_ms, took_ms))
    first, behind = (sum(found) / len(found) for found in errors)
    assert behind < (0.7 * first if shared else 0.015), (first, behind)


def test_decode_steps_say_nothing_of_when_training_was(trained: LatencyPredictor) -> None:
    restored, batch = LatencyPredictor("h", "m"), with_prompts(BatchShape(10, 12_000), (1500, 0))
    restored.restore(trained.export())
    trains(restored)
    before_ms = restored.batch_ms(batch, cautious=False)
    learn(restored, BatchShape(10, 12_000), true_ms(BatchShape(10, 12_000)))
    assert restored.batch_ms(batch, cautious=False) == pytest.approx(before_ms, rel=1e-6)


def test_what_was_said_of_a_batch_is_said_anew_when_something_was_learned(trained: LatencyPredictor) -> None:
    """Of the very same objects, which a plan asks for many times."""
    restored, decodes = LatencyPredictor("h", "m"), BatchShape(10, 12_000)
    restored.restore(trained.export())
    batch = with_prompts(decodes, (1500, 0))
    before, before_ms = restored.prompt_tokens_within(decodes, 45.0, most=8192), restored.batch_ms(batch)
    assert before_ms is not None
    assert before is not None
    trains(restored)
    after_ms = restored.batch_ms(batch)
    assert after_ms is not None
    assert after_ms > 1.05 * before_ms
    for _ in range(200):
        learn(restored, decodes, 2 * true_ms(decodes))
        after = restored.prompt_tokens_within(decodes, 45.0, most=8192)
    assert after is not None
    assert after < 0.9 * before


def test_as_many_prompt_tokens_fit_right_behind_training_as_take_so_long_then(trained: LatencyPredictor) -> None:
    restored, decodes = LatencyPredictor("h", "m"), BatchShape(10, 12_000)
    restored.restore(trained.export())
    for slower in (1.0, 1.1):
        tokens = restored.prompt_tokens_within(decodes, 60.0, most=8192)
        assert tokens is not None
        assert slower * true_ms(with_prompts(decodes, (tokens, 0))) == pytest.approx(60.0, rel=0.04)
        trains(restored)


def test_a_machine_that_becomes_slower_is_noticed(predictor: LatencyPredictor) -> None:
    restored, rng = LatencyPredictor("h", "m"), random.Random(4)
    restored.restore(predictor.export())
    for _ in range(1000):
        batch = random_batch(rng)
        learn(restored, batch, 2 * true_ms(batch))
    for num_decode in range(41, 60):  # none of these was ever run
        batch = BatchShape(num_decode, num_decode * 1000)
        assert restored.batch_ms(batch, cautious=False) == pytest.approx(2 * true_ms(batch), rel=0.15)


def test_batches_of_seconds_are_learned_as_well() -> None:
    """As on a CPU with a model of some billion parameters."""
    rng, predictor = random.Random(5), LatencyPredictor("h", "m")
    for _ in range(400):
        batch = random_batch(rng)
        learn(predictor, batch, 1000 * true_ms(batch))
    errors = []
    for batch in (random_batch(rng) for _ in range(300)):
        predicted_ms = predictor.batch_ms(batch, cautious=False)
        assert predicted_ms is not None
        errors.append(abs(predicted_ms / (1000 * true_ms(batch)) - 1))
    assert sorted(errors)[int(0.95 * len(errors))] < 0.2
