"""On the GPU every family answers as transformers does: in float32 token by token, in half precision as near to float32
as transformers in the same precision is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from cotenant.core.request import Request
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ResolvedModel, read_spec
from gpu import support
from gpu.support import DEVICE, Model, Outputs, Overlapped, logits_of, logprobs, request, tokens
from models import support as small

BF16, FP16 = torch.bfloat16, torch.float16
GRAPH_SIZES = (1, 4, 12)  # of up to 12 sequences: most batches are padded


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module", autouse=True)
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Models by name. All kernels that are going to be used are compiled side by side from here on."""
    import flashinfer  # noqa: F401 - before there are threads that do it

    from cotenant.models.attention_kernels import prepare
    from cotenant.models.paged_attention import is_supported

    made = cache(lambda name: support.make_model(name, tmp_path_factory.mktemp(name)))
    for name, dtype in [*((name, BF16) for name in support.MODELS), ("llama", FP16)]:
        assert is_supported(made(name).spec, DEVICE, dtype)
        prepare(made(name).spec, DEVICE, dtype)
    return made


@pytest.mark.parametrize("name", small.MODELS)
def test_fp32_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, several sequences of different lengths, a prefix found in the cache.

    In none of these texts are the two best logits nearer than 0.0009, nine times what float32 may differ by here.
    """
    reference = small.make_pair(name, tmp_path).reference.to(DEVICE)
    decoder = load_decoder(ResolvedModel(name, tmp_path, read_spec(tmp_path)), DEVICE, torch.float32, seed=0)
    online = Overlapped(decoder, page_tokens=4, max_num_seqs=6, max_num_batched_tokens=20, max_model_len=128)
    lengths = (1, 33, 7, 52, 16, 21, 4, 40)
    requests = [request(small.tokens(length, seed=5), 20 + index) for index, length in enumerate(lengths)]
    requests.append(request([*requests[1].prompt, 5, 6], 20))
    outputs = online.run(requests)
    assert online.engine.num_hit_tokens == 32, "the last prompt begins with another"
    assert any(one.shape.num_decode > 1 and one.shape.prefill_tokens > 1 for one in online.collected)
    for one in requests:
        assert tokens(outputs[one.request_id]) == _greedy(reference, one)
    assert len(set(tokens(outputs[requests[3].request_id]))) > 3, "text of one token over and over proves little"


def _greedy(reference: PreTrainedModel, one: Request) -> list[int]:
    ids = torch.tensor([one.prompt], device=DEVICE)
    new = one.sampling.max_tokens
    with torch.no_grad():
        generated = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    answer: list[int] = generated[0, len(one.prompt) :].tolist()
    return answer


@pytest.mark.parametrize("name", support.MODELS)
def test_bf16_is_as_near_to_fp32_as_transformers_is(name: str, model_of: Callable[[str], Model]) -> None:
    _check_half_precision(name, model_of(name), BF16)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_compressed_weights_are_as_near(name: str, model_of: Callable[[str], Model]) -> None:
    _check_half_precision(name, model_of(name), BF16, compress=True)


def test_fp16_is_as_near_to_fp32_as_transformers_is(model_of: Callable[[str], Model]) -> None:
    _check_half_precision("llama", model_of("llama"), FP16)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", support.MODELS)
def test_what_lies_in_rows_that_nobody_wrote_changes_nothing(
    name: str, dtype: torch.dtype, model_of: Callable[[str], Model]
) -> None:
    """Not even NaN, which a batch of an aborted request may leave in pages that are free by then. What lies behind a
    head in a wider row stays 0: nothing writes there."""
    for is_captured in (True, False) if dtype == BF16 else (False,):
        online = Overlapped(model_of(name).decoder(dtype), max_num_seqs=12, enable_prefix_caching=False)
        if is_captured:
            online.capture(GRAPH_SIZES)
        online.engine.wait_for_kernels()  # prompts go through other ones from then on
        found = []
        for left_there in (0.0, torch.nan, torch.inf):
            online.engine.kv_cache[..., : model_of(name).spec.head_dim].fill_(left_there)
            outputs = online.run(_requests()).values()
            found.append([(tokens(one), logprobs(one)) for one in outputs])
        assert all(len(chosen) >= 30 for chosen, _ in found[0])
        assert found[1] == found[0]
        assert found[2] == found[0]


def _check_half_precision(name: str, model: Model, dtype: torch.dtype, *, compress: bool = False) -> None:
    """With captured graphs and without: errors of the log-probabilities of the tokens that the engine has chosen."""
    decoder, theirs = model.decoder(dtype, compress=compress), model.reference_in(dtype)
    assert decoder.weights.is_compressed == compress
    for is_captured in (True, False):
        online = Overlapped(decoder, max_num_seqs=12)
        assert online.runner is not None
        if is_captured:
            online.capture(GRAPH_SIZES)
        requests = _requests()
        outputs = online.run(requests)
        assert online.engine.num_hit_tokens >= 8 * 64, "prompts that begin alike share pages"
        decoded = {one.shape.num_decode for one in online.collected if one.shape.prefill_tokens == 0}
        assert len(decoded - set(GRAPH_SIZES)) > 3, "batches that need padding"
        our_errors = _errors(model.reference, requests, outputs)
        their_errors = _errors(model.reference, requests, outputs, theirs)
        figures = {
            "model": f"{name} {dtype} {'graphs' if is_captured else 'eager'}",
            "num_tokens": len(our_errors),
            "mean": (float(our_errors.mean()), float(their_errors.mean())),
            "p99": (float(our_errors.quantile(0.99)), float(their_errors.quantile(0.99))),
        }
        print(json.dumps(figures))
        assert 0 < our_errors.mean() <= 1.1 * their_errors.mean(), figures
        assert our_errors.quantile(0.99) <= 1.3 * their_errors.quantile(0.99), figures


def _requests() -> list[Request]:
    """Prompts of one token up to several chunks, every other one behind the same 64 tokens; text is drawn."""
    shared = support.prompt(64, seed=9)
    requests = []
    for index in range(24):
        own = support.prompt(1 + (37 * index) % 120, seed=index)
        sampling = {"temperature": 1.0, "seed": index, "logprobs": 1}
        requests.append(request(shared + own if index % 2 else own, 30 + index % 19, **sampling))
    return requests


def _errors(
    exact: PreTrainedModel, requests: Sequence[Request], outputs: Outputs, theirs: PreTrainedModel | None = None
) -> torch.Tensor:
    """Absolute errors of the chosen tokens' log-probabilities against ``exact`` on the same text, all requests' in one
    row: the engine's, or those of ``theirs``."""
    errors = []
    for one in requests:
        chosen = tokens(outputs[one.request_id])
        assert len(chosen) == one.sampling.max_tokens
        expected = _logprobs(exact, one, chosen)
        if theirs is not None:
            found = _logprobs(theirs, one, chosen)
        else:
            found = torch.tensor(logprobs(outputs[one.request_id]), device=DEVICE)
        errors.append((found - expected).abs())
    return torch.cat(errors)


def _logprobs(reference: PreTrainedModel, one: Request, chosen: Sequence[int]) -> torch.Tensor:
    """[chosen tokens]"""
    logits = logits_of(reference, [*one.prompt, *chosen[:-1]])[len(one.prompt) - 1 :]
    return logits.log_softmax(-1).gather(-1, torch.tensor(chosen, device=DEVICE).unsqueeze(-1)).squeeze(-1)
