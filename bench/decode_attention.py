"""How long the attention of a decode step takes on some of a GPU's SMs, by kernel: in each layer it reads the keys and
values of all sequences.

"own": the one that serves. "fa2" and "cuda cores": FlashInfer's decode kernels, which are cut for all SMs, whatever
part of them they run on. "xqa": cut for the SMs at hand; "xqa, all": cut for all of them, which gives the same bits
everywhere. XQA cuts a sequence only where sequences times KV heads are fewer than the SMs, so the two differ for few
sequences. Outputs are compared with fa2's.

    python bench/decode_attention.py --shapes 32x1000,8x1024,64x512,32x4096,4x4096,1x4096 --json attention.json

Needs an NVIDIA GPU with green contexts, and minutes at first: kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashinfer
import torch
from flashinfer.xqa import xqa
from replays import replayed_us

from cotenant.device.cuda.partitions import split_multiprocessors
from cotenant.models import decode_chunks
from cotenant.models.kernels.decode_attention import DecodeAttention
from cotenant.models.skinny_tiling import sms_at_hand

# Llama-3.1-8B's, and the server's pages.
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 16
_CACHE_BYTES = 600e6  # of layers in turn: more than the cache holds
_WORKSPACE_BYTES = 512 << 20
_TOLERANCE = 2e-3  # outputs are a few hundredths

Attend = Callable[[torch.Tensor, torch.Tensor], None]
"""(layer [pages, 2, page tokens, heads, head_dim], output [sequences, heads, head_dim])"""


class Sequences:
    """``batch_size`` of them with ``context`` tokens each; as many layers as make the cache large enough."""

    def __init__(self, batch_size: int, context: int, device: torch.device) -> None:
        pages_each = -(-context // PAGE_TOKENS)
        shape = (batch_size * pages_each, 2, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        self.context = context
        self.layer_bytes = 2 * shape[0] * PAGE_TOKENS * KV_HEADS * HEAD_DIM * 2
        num_layers = max(2, -(-int(_CACHE_BYTES) // self.layer_bytes))
        self.layers = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(num_layers)]
        self.query = torch.randn(batch_size, QUERY_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        self.table = torch.randperm(shape[0], device=device).int().view(batch_size, pages_each)
        self.starts = torch.arange(batch_size + 1, dtype=torch.int32) * pages_each
        self.last_lengths = torch.full((batch_size,), context - (pages_each - 1) * PAGE_TOKENS, dtype=torch.int32)
        self.lengths = torch.full((batch_size, 1), context, device=device).to(torch.uint32)
        torch.cuda.synchronize()  # the lanes wait for no other stream

    def by_own(self, num_sms: int) -> Attend:
        spec: Any = SimpleNamespace(
            num_heads=QUERY_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, sliding_window=None
        )
        device, batch_size = self.query.device, len(self.query)
        own = DecodeAttention(spec, device, torch.bfloat16, HEAD_DIM, PAGE_TOKENS, batch_size, self.context)
        chunks = torch.from_numpy(
            decode_chunks.cut(self.starts.numpy(), [self.context] * batch_size, None, KV_HEADS)
        ).to(device)
        lists = torch.cat([chunks, self.table.flatten()])
        torch.cuda.synchronize()

        def attend(layer: torch.Tensor, output: torch.Tensor) -> None:
            with sms_at_hand(num_sms):
                own(self.query, layer, lists, output)

        return attend

    def planned(self, *, use_tensor_cores: bool) -> Attend:
        device, indices = self.query.device, self.table.flatten().clone()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=self.starts.to(device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=self.last_lengths.to(device),
            backend="fa2",
        )
        heads = (QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(self.starts, indices, self.last_lengths, *heads, **types)
        return lambda layer, output: wrapper.run(self.query, layer.unbind(1), out=output)

    def by_xqa(self, num_sms: int) -> Attend:
        device = self.query.device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        semaphores = torch.zeros(1 << 20, dtype=torch.int32, device=device).view(torch.uint32)

        def attend(layer: torch.Tensor, output: torch.Tensor) -> None:
            keys, values = layer.unbind(1)
            xqa(
                self.query[:, None], keys, values, self.table, self.lengths, output[:, None], workspace, semaphores,
                KV_HEADS, PAGE_TOKENS, sm_count=num_sms, enable_pdl=False,
            )  # fmt: skip

        return attend


# (the sequences, SMs at hand, all SMs)
KERNELS: dict[str, Callable[[Sequences, int, int], Attend]] = {
    "own": lambda of, num_sms, _: of.by_own(num_sms),
    "fa2": lambda of, *_: of.planned(use_tensor_cores=True),
    "cuda cores": lambda of, *_: of.planned(use_tensor_cores=False),
    "xqa": lambda of, num_sms, _: of.by_xqa(num_sms),
    "xqa, all": lambda of, _, num_all: of.by_xqa(num_all),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default="32x1000,8x1024,64x512,32x4096,4x4096,1x4096", help="sequences x tokens of each"
    )
    parser.add_argument("--sms", default="32,48,64,80", help="besides all of them")
    parser.add_argument("--kernel", action="append", choices=list(KERNELS), help="may come again; all, if left out")
    parser.add_argument("--chunk-tokens", type=int, help="own: of all sequences, unless there are too many chunks")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.chunk_tokens is not None:
        decode_chunks._LEAST_TOKENS, decode_chunks._USUAL_TOKENS = (), arguments.chunk_tokens
    device = torch.device("cuda", torch.cuda.current_device())
    made = split_multiprocessors(device, [int(part) for part in arguments.sms.split(",")])
    lanes: dict[int, torch.cuda.Stream] = {partition.online_sms: streams.online for partition, streams in made.items()}
    num_all = torch.cuda.get_device_properties(device).multi_processor_count
    lanes[num_all] = torch.cuda.Stream()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes.split(","):
        batch_size, context = map(int, shape.split("x"))
        sequences = Sequences(batch_size, context, device)
        for name in arguments.kernel or KERNELS:
            for num_sms, stream in lanes.items():
                attend = partial(KERNELS[name], sequences, num_sms, num_all)
                row = {"shape": shape, "kernel": name, "num_sms": num_sms, **_measured(sequences, attend, stream)}
                rows.append(row)
                print(json.dumps(row), flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def _measured(sequences: Sequences, make: Callable[[], Attend], stream: torch.cuda.Stream) -> dict[str, Any]:
    """Microseconds of one layer, or why there are none."""
    output, expected = torch.empty_like(sequences.query), torch.empty_like(sequences.query)
    with torch.cuda.stream(stream):
        sequences.planned(use_tensor_cores=True)(sequences.layers[0], expected)
        try:
            attend = make()
            attend(sequences.layers[0], output)
            stream.synchronize()
        except RuntimeError as error:
            return {"error": str(error)[:300]}
        worst = (output.float() - expected.float()).abs().max().item()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in sequences.layers:
                attend(layer, output)
        times_us = [replayed_us(graph) / len(sequences.layers) for _ in range(5)]
    us = statistics.median(times_us)
    return {"us": round(us, 2), "GB/s": round(sequences.layer_bytes / us / 1e3), "agrees": worst <= _TOLERANCE}


if __name__ == "__main__":
    main()
