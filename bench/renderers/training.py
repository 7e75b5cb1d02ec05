"""Results about training: its speed beside other libraries, what disturbances do, its adapters elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.text import Result, machine_text, spread_text, table

# cotenant bench finetune, bench/compare_finetune.py


def finetune(results: Sequence[Result]) -> list[str]:
    """A row for each result; then, where it was measured, what cutting costs and how memory was given away, and the
    times of tasklets, suspensions and discards. Of other libraries there are fewer figures. Where each variant ran at
    several sizes, its best is in bold."""
    first = results[0]
    text = (
        f"`{first['command']}`: {first['model']}, {first['dtype']}, on {machine_text(first)}. LoRA of rank "
        f"{first['r']} on all linear layers, sequences of {first['seq_len']:,} random tokens, "
        f"{first['tokens_per_step']:,} tokens a step.{_share_text(first)}{_libraries_text(results)}"
    )
    header = ["", "micro-batch", "tokens/s", "share", "step, ms", "peak memory, GiB", "CPU of the launching thread"]
    rows = [_finetune_row(result) for result in results]
    if len({result["label"] for result in results}) > 1:
        header.append(f"speed of {first['label']} / its")
        fastest = max(_speed(result) for result in results if result["label"] == first["label"])
        rows = [[*row, f"{fastest / _speed(result):.3f}"] for row, result in zip(rows, results, strict=True)]
    return [text, table(header, rows), *_cuts(results), *_times(results)]


def _speed(result: Result) -> float:
    return float(result["tokens_per_s"]["mean"])


def _libraries_text(results: Sequence[Result]) -> str:
    """The versions of what others train with."""
    versions = {name: version for result in results for name, version in result["versions"].items() if version}
    names = [name for name in versions if name not in ("python", "cotenant", "torch")]
    return f" With {', '.join(f'{name} {versions[name]}' for name in names)}." if names else ""


def _cuts(results: Sequence[Result]) -> list[str]:
    """A row for each result that says what a step cut into tasklets takes longer than an uncut one."""
    header = ["", "micro-batch", "layers captured", "cut / uncut step", "asked for, GiB", "unmapped, GiB", "in, ms"]
    header.append("another's, ms")
    rows = []
    for result in results:
        if "uncut" not in result:
            continue
        row = [*_names(result), "yes" if result["captured"] else "no", f"{result['uncut']['difference']:+.2%}"]
        require = result["require"]
        if require is None:
            rows.append([*row, "-", "-", "-", "-"])
            continue
        unmapped = require["unmapped_mib"]["p50"] / 1024
        row += [f"{require['num_bytes'] / 2**30:.1f}", f"{unmapped:.2f}"]
        if "unmapped_ms" in require:
            rows.append([*row, f"{require['unmapped_ms']['p50']:.2f}", f"{require['mean_ms']:.2f}"])
        else:
            rows.append([*row, f"{require['latency_ms']['p50']:.2f}", "-"])
    text = (
        "How much longer a step takes whose tasklets are launched one by one than one whose micro-batches are launched "
        "whole, in pairs; what `require` unmapped in the middle of a backward pass, and in how long (median); and how "
        "long it took until another arena had it, cleared (mean):"
    )
    return [text, table(header, rows)] if rows else []


def _times(results: Sequence[Result]) -> list[str]:
    """On the device for tasklets; on the host from the call, or from 'stop', for the rest."""
    header = ["", "micro-batch", "", "count", "p50", "p10", "p90", "p99", "max"]
    rows = [[*_names(result), *row] for result in results for row in _times_of(result)]
    return ["Milliseconds:", table(header, rows)] if rows else []


def _times_of(result: Result) -> list[list[str]]:
    spreads = {f"tasklet: {kind}": (spread["count"], spread) for kind, spread in result.get("tasklet_ms", {}).items()}
    for name in ("suspend", "discard", "require"):
        if result.get(name) is not None:
            spreads[name] = (result[name]["num_samples"], result[name]["latency_ms"])
    shares = ("p50", "p10", "p90", "p99", "max")
    return [
        [name, str(count), *(f"{spread[share]:.3f}" for share in shares)] for name, (count, spread) in spreads.items()
    ]


def _names(result: Result) -> list[str]:
    """The cells that say which result a row belongs to."""
    checkpointing = ", gradient checkpointing" if result["gradient_checkpointing"] else ""
    dropout = f", dropout {result['dropout']:g}" if result.get("dropout") else ""
    return [f"{result['label']}{checkpointing}{dropout}", f"{result['micro_batch_tokens']:,}"]


def _share_text(first: Result) -> str:
    if "ceilings" not in first:
        return ""
    return (
        f" The share is of {first['ceilings']['matmul_tflop_s']:.4g} TFLOP/s of a matrix product in the same run, at "
        f"{first['flop_per_token'] / 1e9:.3g} GFLOP a token: 4 for each parameter, the embedding's included, attention "
        f"and the adapter left out (in brackets: {first['flop_per_token_multiplied'] / 1e9:.3g}, without the "
        "embedding's, by which nothing is multiplied)."
    )


def _finetune_row(result: Result) -> list[str]:
    memory, cpu_share = result["memory"], result.get("cpu_share")
    peak = memory.get("peak_allocated_bytes", memory.get("peak_resident_bytes"))
    reserved = f", reserved {memory['peak_reserved_bytes'] / 2**30:.1f}" if "peak_reserved_bytes" in memory else ""
    speed = f"{_speed(result):,.0f}"
    share = "share_of_matmul_rate"
    return [
        *_names(result),
        f"**{speed}**" if result.get("best") else speed,
        f"{result[share]:.1%} ({result[f'{share}_multiplied']:.1%})" if share in result else "-",
        spread_text(result["step_ms"]),
        f"{peak / 2**30:.1f}{reserved}",
        f"{cpu_share['launching_thread']:.1%}, launching {cpu_share['launching']:.1%}" if cpu_share else "-",
    ]


# bench/convergence.py


def convergence(results: Sequence[Result]) -> list[str]:
    (result,) = results
    disturbances = ", ".join(f"{count} times {kind}" for kind, count in result["disturbances"].items())
    rows = [
        [
            name,
            " ".join(f"{loss:.3f}" for loss in result[name]["final_validation_losses"]),
            f"{result[name]['mean']:.3f}",
            f"{result[name]['standard_deviation']:.3f}",
        ]
        for name in ("undisturbed", "disturbed")
    ]
    return [
        f"`{result['command']}`: {result['steps']} steps for each seed, on {machine_text(result)}. Disturbed about "
        f"every {result['seconds_between_disturbances']:g} s, over all seeds: {disturbances}. The two runs of a seed "
        f"differ by at most {result['largest_paired_difference']:.2g}.",
        table(["", "final validation loss, one for each seed", "mean", "standard deviation"], rows),
    ]


# bench/adapter_in_vllm.py


def adapter(results: Sequence[Result]) -> list[str]:
    return [part for result in results for part in _adapter(result)]


def _adapter(result: Result) -> list[str]:
    model, num_prompts = result["model"], result["num_prompts"]
    outcome = "passed" if result["passed"] else "failed: " + "; ".join(result["problems"])
    equal = {name: count for name, count in result["num_equal"].items() if name != "cotenant"}
    rows = [[f"{name} {result['versions'][name]}", f"{count} of {num_prompts}"] for name, count in equal.items()]
    return [
        f"`{result['command']}`: a random Llama (hidden size {model['hidden_size']}, {model['num_hidden_layers']} "
        f"layers, heads of {model['head_dim']}) in {result['dtype']}, on {machine_text(result)}. A job of "
        f"{result['num_steps']} steps, rank {result['r']} on all linear layers{_patterns_text(result)}, memorised "
        f"{result['num_memorised']} of {num_prompts} sequences of random tokens; each was then continued greedily by "
        f"{result['num_tokens']} tokens. The chosen token's logit was ahead of the next one's by "
        f"{result['smallest_margin']:.2f} at least. **{outcome}**",
        table(["", "the same tokens as ours"], [*rows, ["no adapter", f"{result['num_as_base']} of {num_prompts}"]]),
    ]


def _patterns_text(result: Result) -> str:
    """Which modules have another rank or alpha, and whether the scale is rsLoRA's."""
    patterns = result["patterns"]
    if patterns is None:
        return ""
    others = [
        f"{what} {value:g} on {module}"
        for what, name in (("rank", "rank_pattern"), ("alpha", "alpha_pattern"))
        for module, value in patterns[name].items()
    ]
    scale = ", with rsLoRA's scale" if patterns["use_rslora"] else ""
    return f" but {', '.join(others)}{scale}"
