"""The GPU's runner on the CPU, over stand-ins for what only a GPU has: batches of all kinds against each request alone.

`python runner_on_cpu.py MODEL_FOLDER`, in a process of its own, for the stand-ins take the places of modules. A wrapper
of FlashInfer is as strict as its contract: it keeps its last plan alone, takes exactly the rows of that plan, and
writes those and no others; and no batch plans it twice. Graphs run what they captured; kernels are plain torch; what
nobody writes is NaN.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn import functional

# The kernels, in plain torch.


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return weight * functional.rms_norm(x, x.shape[-1:], None, epsilon)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _norm(residual.add_(x), weight, epsilon)


_embedded: set[int] = set()  # how many rows batches had


def _embed(ids: torch.Tensor, last_tokens: torch.Tensor, seats: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert (seats >= 0).all()
    _embedded.add(len(ids))
    return table[torch.where(ids < 0, last_tokens[seats.long()], ids.long())]


def _silu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate) * up


def _rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cache: torch.Tensor,
    num_heads: int,
    epsilon: float,
) -> torch.Tensor:
    assert qk_norm is None
    assert (positions >= 0).all()
    _, _, page_tokens, num_kv_heads, width = cache.shape
    head_dim = table.shape[1]
    heads = qkv.view(len(qkv), -1, head_dim)
    low, high = heads[:, : num_heads + num_kv_heads].chunk(2, dim=-1)
    cos, sin = (part[:, None] for part in table[positions.long()].chunk(2, dim=1))
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    kept = slots >= 0
    places = slots[kept].long()
    assert len(places.unique()) == len(places), "two rows write one slot"
    mine = cache[..., :head_dim]
    mine[:, 0][places // page_tokens, places % page_tokens] = rotated[kept, num_heads:]
    mine[:, 1][places // page_tokens, places % page_tokens] = heads[kept, num_heads + num_kv_heads :]
    return functional.pad(rotated[:, :num_heads], (0, width - head_dim)).contiguous()


# FlashInfer's wrappers.


class _Wrapper:
    planned: ClassVar[set[_Wrapper]] = set()  # in this batch

    def _keep(
        self, starts: torch.Tensor, indptr: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, scale: float
    ) -> None:
        assert self not in self.planned, "a wrapper is planned twice in a batch"
        self.planned.add(self)
        assert all(part.dtype == torch.int32 for part in (indptr, pages, last))
        assert len(pages) >= int(indptr[-1])
        self._plan = (starts.tolist(), indptr, pages, last, scale)

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        starts, indptr, pages, last, scale = self._plan
        assert len(query) == starts[-1], f"{len(query)} rows, planned for {starts[-1]}"
        assert query.shape[2] == cache[0].shape[3], "as wide as the cache"
        for index, (first, stop) in enumerate(itertools.pairwise(starts)):
            mine = pages[int(indptr[index]) : int(indptr[index + 1])].long()
            length = (len(mine) - 1) * cache[0].shape[1] + int(last[index])
            keys, values = (part[mine].flatten(0, 1)[:length].transpose(0, 1)[None] for part in cache)
            seen = torch.ones(stop - first, length, dtype=torch.bool).tril(length - (stop - first))
            found = functional.scaled_dot_product_attention(
                query[first:stop].transpose(0, 1)[None], keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            )
            out[first:stop] = found[0].transpose(0, 1)
        return out


class _DecodeAttention:
    """Reads the lists as the kernel does: each chunk is some tokens of a sequence, and all of them are what it sees."""

    def __init__(
        self, spec: Any, device: object, dtype: object, width: int, page_tokens: int, num_sequences: int, most: int
    ) -> None:
        self._num_sequences, self._most_tokens = num_sequences, most
        self._page_tokens, self._scale = page_tokens, spec.head_dim**-0.5

    def compile(self) -> None:
        pass

    def __call__(
        self,
        query: torch.Tensor,
        layer_cache: torch.Tensor,
        lists: torch.Tensor,
        out: torch.Tensor,
        *,
        begins_early: bool = False,
    ) -> torch.Tensor:
        assert lists.dtype == torch.int32
        assert lists.data_ptr() % 16 == 0, "the kernel reads four integers at once"
        chunks = lists[8 : 8 + 8 * int(lists[0])].view(-1, 8).tolist()
        seen: dict[int, set[int]] = {}
        for row, begin, end, _, part, parts, first, length in chunks:
            tokens = seen.setdefault(row, set())
            assert tokens.isdisjoint(range(begin, end))
            tokens.update(range(begin, end))
            assert 0 <= part < parts
            assert length <= self._most_tokens
            assert first + part < len(chunks)
        assert sorted(seen) == list(range(len(seen)))
        assert len(seen) <= self._num_sequences
        for row, _, _, pages, _, _, _, length in chunks:
            assert seen[row] == set(range(length))
            mine = lists[pages : pages - (-length // self._page_tokens)].long()
            keys, values = (part[mine].flatten(0, 1)[:length].transpose(0, 1) for part in layer_cache.unbind(1))
            found = functional.scaled_dot_product_attention(
                query[row, :, None][None], keys[None], values[None], scale=self._scale, enable_gqa=True
            )
            out[row] = found[0, :, 0]
        return out


class _PrefillWrapper(_Wrapper):
    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        pass

    def plan(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        *_: Any,
        sm_scale: float,
        **__: Any,
    ) -> None:
        self._keep(starts, indptr, indices, last, sm_scale)


# Their places.


def _put(name: str, **content: Any) -> None:
    sys.modules[name] = module = ModuleType(name)
    module.__dict__.update(content)


_ALL_SMS, *_PARTITIONS = 1, 2, 3
_lane = _ALL_SMS


class _Graph:
    """Runs on the SMs that it was captured on, whoever launches it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._lane = _lane

    @torch.no_grad()
    def replay(self) -> None:
        assert self._lane == _lane, "a graph of other SMs"
        self._run()


def _capture(run: Callable[[], None], pool: object, *, warm_up: bool = True) -> _Graph:
    run()
    _Wrapper.planned.clear()  # a capture is no batch
    return _Graph(run)


def install() -> None:
    kernels = "cotenant.models.kernels."
    _put(kernels + "elementwise", add_rms_norm=_add_norm, embed=_embed, rms_norm=_norm, silu_and_multiply=_silu)
    _put(kernels + "lora_shrink", find_pieces=lambda slots, ranks: slots)
    _put(kernels + "rope", rope_and_cache=_rope_and_cache)
    _put(kernels + "together", compiled_together=nullcontext)
    _put(
        kernels + "skinny",
        Unfinished=type(None),
        fits_unfinished=lambda x, base: False,
        skinny_product=None,
        unfinished_product=None,
    )
    _put(kernels + "decode_attention", DecodeAttention=_DecodeAttention)
    _put("flashinfer", BatchPrefillWithPagedKVCacheWrapper=_PrefillWrapper)
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    torch.cuda.Event = lambda **_: SimpleNamespace(  # type: ignore[misc,assignment]
        record=nothing, synchronize=nothing, elapsed_time=lambda _: 1.0
    )
    torch.cuda.synchronize = nothing
    torch.cuda.graph_pool_handle = nothing  # type: ignore[assignment]
    empty_like = torch.empty_like
    torch.empty_like = lambda like, **_: empty_like(like).fill_(float("nan"))

    from cotenant.device.cuda import graphs
    from cotenant.engine import assemble
    from cotenant.engine.engine import OnlineEngine
    from cotenant.models import paged_attention
    from cotenant.models.batch import PageLists

    schedule = OnlineEngine.schedule

    def next_batch(engine: OnlineEngine) -> Any:
        _Wrapper.planned.clear()
        return schedule(engine)

    OnlineEngine.schedule = next_batch  # type: ignore[method-assign]
    assemble.page_lists = lambda segment, page_tokens, device: PageLists(
        *map(torch.from_numpy, assemble.page_indices(segment, page_tokens))
    )
    graphs.capture_graph = _capture  # type: ignore[assignment]
    graphs.current_lane = lambda: _lane
    from cotenant.models.cuda_pieces import CapturedPieces  # with these graphs

    layer_ms = CapturedPieces.layer_ms

    def timed(pieces: CapturedPieces) -> float:
        return layer_ms(pieces) * _PIECE_TIMES_MS[len(pieces.residual)]

    CapturedPieces.layer_ms = timed  # type: ignore[method-assign]
    turns = iter(range(1 << 30))
    paged_attention.prepare = lambda *_: SimpleNamespace(  # type: ignore[attr-defined]
        wait=nothing, compile_the_rest=nothing, is_ready=lambda backend: next(turns) % 3 == 0
    )
    paged_attention._workspace_bytes = lambda *_: 16


# What is compared.


_PIECE_TIMES_MS = {8: 1.0, 16: 2.5, 32: 2.0}  # by tokens: the one in the middle is of no use
_MOST_TOKENS = 24  # of a batch, as the runner knows: no larger size is captured than the one that holds so many


def _engine(small: Any, page_tokens: int, budget: int, width: int | None = None) -> Any:
    """``width``: the room that a head has in the cache; None: what it needs."""
    from cotenant.engine import engine

    engine.cache_head_dim = lambda spec, *_: width or spec.head_dim  # type: ignore[attr-defined]
    return small.engine(160 // page_tokens + 8, page_tokens, 10, budget, max_model_len=96, max_loras=6)


def on_gpus_runner(small: Any, engine: Any, sizes: Sequence[int]) -> Any:
    from cotenant.engine import cuda_runner
    from cotenant.models.lora_stacks import LoraStacks

    adapters = engine._adapters.cache
    adapters.stacks = LoraStacks(small.decoder.spec, 6, 8, torch.device("cpu"), torch.float32)
    cuda_runner._PIECE_SIZES = (*_PIECE_TIMES_MS, 64)  # type: ignore[assignment]
    cuda_runner._PARTITION_SIZES = (2, 4)  # type: ignore[assignment]
    cache, last_tokens = engine._cache.tensor, engine._sampler.last_tokens
    _go_to(_ALL_SMS)
    runner = cuda_runner.CudaRunner(small.decoder, cache, last_tokens, adapters.stacks, 10, _MOST_TOKENS, 96)
    if sizes:
        runner.capture(sizes)
        assert list(runner._pieces[None]) == [8, 32]
    engine._flights.runner = runner
    for lane in _PARTITIONS:
        _go_to(lane)
        with_prompts = lane == _PARTITIONS[0]  # in the others such a batch is launched operation by operation
        while not runner.capture_lane(num_sms=2, with_prompts=with_prompts):
            pass
        assert not sizes or list(runner._pieces.get(lane, ())) == ([8, 32] if with_prompts else [])
    _go_to(_ALL_SMS)
    return engine


def _go_to(lane: int) -> None:
    global _lane
    _lane = lane


def _requests(small: Any, refs: Sequence[Any], rng: random.Random) -> list[Any]:
    shared = small.prompt(16, 1)
    requests = []
    for index in range(26):
        own = small.prompt(rng.choice([1, 1, 2, 5, 9, 17, 30]), index)
        behind = shared[: rng.choice([4, 8, 16])] + small.prompt(rng.choice([1, 1, 3]), index)
        adapter = refs[rng.randrange(len(refs))] if rng.random() < 0.7 else None
        requests.append(
            small.request(
                own if rng.random() < 0.6 else behind,
                rng.choice([0, 1, 3, 9, 25]),
                priority=rng.choice([0, 0, 1]),
                adapter=adapter,
                **({"prompt_logprobs": 1} if rng.random() < 0.1 else {}),
            )
        )
    return requests


def _alone(small: Any, request: Any) -> list[int]:
    engine, tokens = _engine(small, 4, 64), []
    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


def _run(engine: Any, requests: Sequence[Any], rng: random.Random, num_ahead: int) -> dict[str, list[int]]:
    """Tokens by request, but for those that were aborted on the way."""
    waiting, tokens = list(requests), {request.request_id: [] for request in requests}  # type: ignore[var-annotated]
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                engine.add(waiting.pop())
        if rng.random() < 0.03 and engine.views():
            aborted = rng.choice(engine.views()).request_id
            engine.abort([aborted])
            del tokens[aborted]
        _go_to(rng.choice([_ALL_SMS, _ALL_SMS, *_PARTITIONS]))
        for output in engine.iterate(num_ahead).outputs:
            if output.request_id in tokens:
                tokens[output.request_id] += output.token_ids
    engine.check_integrity()
    return tokens


def main() -> None:
    from engine.conftest import SmallModel

    torch.set_num_threads(1)
    small = SmallModel(Path(sys.argv[1]), None)
    folder = Path(tempfile.mkdtemp())
    refs = [small.make_adapter(folder, f"adapter-{seed}", seed) for seed in range(8)]
    plain, expected = small.decoder.attention, {}
    for sizes in ((), (1, 2, 4), (1, 2, 4, 8, 10)):
        for page_tokens, budget, num_ahead, width in ((4, 48, 1, None), (16, 20, 1, 24), (1, 90, 0, 24)):
            rng = random.Random(page_tokens)
            requests = _requests(small, refs, rng)
            small.decoder.attention = plain
            for request in requests:
                key = (request.prompt, request.adapter, request.sampling.max_tokens)
                if key not in expected:
                    expected[key] = _alone(small, request)
            engine = on_gpus_runner(small, _engine(small, page_tokens, budget, width), sizes)
            found = _run(engine, requests, rng, num_ahead)
            for request in requests:
                key = (request.prompt, request.adapter, request.sampling.max_tokens)
                if request.request_id in found:
                    assert found[request.request_id] == expected[key], (sizes, page_tokens, request)
            print(sizes, page_tokens, len(found), "requests agree", flush=True)
    from cotenant.engine.cuda_runner import choose_compiled_sizes

    for most in ((1, 8), (8, 20), (20, 8192), (256, 8192), (2000, 8192)):
        sizes = choose_compiled_sizes(*most)
        print(f"of {most[0]} sequences and {most[1]} tokens at most, {sizes} rows are compiled", flush=True)
    for enforce_eager in (False, True):
        _embedded.clear()
        runner = on_gpus_runner(small, _engine(small, 4, 48), ())._flights.runner
        runner.warm_up((2,), (), lambda: None, enforce_eager=enforce_eager)
        decodes = sorted(_embedded - set(_PIECE_TIMES_MS))
        print("steps of", decodes, "rows are compiled,", list(runner._captured[None]), "captured", flush=True)


if __name__ == "__main__":
    install()
    main()
