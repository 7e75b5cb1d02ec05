"""Who runs when: decodes before prefill, priority, arrival, and that nobody waits for ever."""

import itertools


def first_outputs(small, engine, max_steps: int = 500) -> list[str]:
    """Run to the end; request ids in the order of their first token."""
    order: list[str] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return order
        order += [output.request_id for output in engine.step() if output.request_id not in order]
        engine.check_integrity()
    raise AssertionError("not finished")


def test_every_decode_gets_its_token_while_prompts_are_read(small) -> None:
    engine = small.engine(num_pages=400, max_num_seqs=6, max_num_batched_tokens=8)
    decoding = [small.request(small.prompt(2, seed), 30) for seed in range(4)]
    for request in decoding:
        engine.add(request)
    engine.step()
    for seed in range(2):
        engine.add(small.request(small.prompt(100, seed), 2, priority=-1))
    for _ in range(25):
        step = engine.schedule()
        assert (step.shape.num_decode, step.shape.prefill_tokens) == (4, 4)
        engine.launch(step)
        outputs = engine.collect().outputs
        assert {output.request_id for output in outputs} >= {request.request_id for request in decoding}


def test_arrival_order_within_a_class_and_classes_before_it(small) -> None:
    engine = small.engine(max_num_seqs=1)
    requests = [small.request(small.prompt(5, index), 3, priority=index % 3) for index in range(9)]
    for request in reversed(requests):
        engine.add(request)
    expected = sorted(requests, key=lambda request: (request.priority, request.arrival_s))
    assert first_outputs(small, engine) == [request.request_id for request in expected]


def test_a_long_prompt_is_not_overtaken_by_short_ones(small) -> None:
    """With an endless stream of short requests that would fit, the long one runs as soon as those before it end."""
    engine = small.engine(num_pages=20, page_tokens=4, max_num_seqs=8, max_num_batched_tokens=64)
    before = [small.request(small.prompt(6, seed), 10) for seed in range(3)]
    long = small.request(small.prompt(70), 4)
    for request in (*before, long):
        engine.add(request)
    finished: set[str] = set()
    for seed in itertools.count(10):
        short = small.request(small.prompt(3, seed), 2)
        engine.add(short)
        outputs = engine.step()
        engine.check_integrity()
        finished |= {output.request_id for output in outputs if output.finish_reason}
        if long.request_id in {output.request_id for output in outputs}:
            break
        assert finished <= {request.request_id for request in before}, "a later request went first"
        assert seed < 40
    assert finished >= {request.request_id for request in before}


def test_nobody_overtakes_a_preempted_request_with_its_own_pages(small) -> None:
    engine = small.engine(num_pages=8, page_tokens=4, max_num_seqs=4)
    old, victim, short = (
        small.request(small.prompt(12, 0), 16),
        small.request(small.prompt(12, 1), 8),
        small.request(small.prompt(3), 2),
    )
    for request in (old, victim, short):
        engine.add(request)
    started: list[str] = []
    while engine.has_work:
        preempted = engine.num_preemptions
        for output in engine.step():
            if preempted and output.request_id != old.request_id:
                started.append(output.request_id)
        engine.check_integrity()
    assert preempted == 1
    assert started[0] == victim.request_id


def test_every_request_of_the_highest_class_ends_under_load_of_lower_classes(small) -> None:
    """A lower class only gets what the higher leaves; it runs when the higher pauses, and loses nothing by waiting."""
    engine = small.engine(num_pages=16, page_tokens=4, max_num_seqs=2)
    low = small.request(small.prompt(20), 12, priority=5)
    engine.add(low)
    engine.step()
    tokens: dict[str, list[int]] = {low.request_id: []}
    high = []
    for index in range(6):
        high.append(small.request(small.prompt(30, index), 8))
        engine.add(high[-1])
        for _ in range(4):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check_integrity()
    for request_id, outputs in small.run(engine).items():
        tokens.setdefault(request_id, []).extend(small.tokens(outputs))
    assert engine.num_preemptions >= 1
    assert tokens[low.request_id] == small.greedy(low.prompt, 12)[1:]
    for request in high:
        assert tokens[request.request_id] == small.greedy(request.prompt, 8)


def test_a_higher_class_takes_pages_from_the_last_of_the_lowest(small) -> None:
    engine = small.engine(num_pages=16, page_tokens=4, max_num_seqs=4)
    old, young, middle = (
        small.request(small.prompt(14, 0), 8, priority=2),
        small.request(small.prompt(14, 1), 8, priority=2),
        small.request(small.prompt(14, 2), 8, priority=1),
    )
    for request in (old, young, middle):
        engine.add(request)
    engine.step()
    assert engine.num_running == 3
    engine.add(small.request(small.prompt(14, 3), 8, priority=0))
    engine.step()
    assert engine.num_preemptions == 1
    waiting = {view.request_id for view in engine.views() if view.num_prompt_tokens_left}
    assert waiting == {young.request_id}


def test_no_class_is_preempted_for_its_own_kind(small) -> None:
    engine = small.engine(num_pages=16, page_tokens=4, max_num_seqs=4)
    engine.add(small.request(small.prompt(40), 8))
    engine.step()
    engine.add(small.request(small.prompt(40, 1), 8))
    first_outputs(small, engine)
    assert engine.num_preemptions == 0
