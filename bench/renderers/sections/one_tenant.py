"""Serving by itself, training by itself, and policies on a CPU."""

from __future__ import annotations

from renderers.section import Section

ONE_TENANT = (
    Section("policies_cpu.json", "Policies side by side"),
    Section("policies_busy_cpu.json", "The same, with four times the traffic"),
    Section(
        "suspend_overhead_cpu.txt",
        "What being suspendable costs",
        "Training steps cut after every layer against the same micro-batches in one go, in turn.",
        "python bench/suspend_overhead.py",
    ),
    Section("convergence_cpu.json", "What disturbances do to what a job learns"),
    Section(
        "serve_conv_h200.json",
        "On a GPU: the conversation trace, beside vLLM",
        "The ten busiest minutes of Azure's conversation trace of 2023 (mean prompt 1,344 tokens, mean answer 143), at "
        "their own rate and faster, against the shapes of Llama-3.1-8B in bf16 with random weights. Each server ran "
        "twice on one host, each time on a GPU of its own and all four at the same time: `python "
        "bench/compare_servers.py --trace conv.csv --busiest 600 --sweep 1 --gpus 0,1` and the same with `--sweep "
        "2,2.25 --gpus 2,3 --port 8120`. A sweep ends for a server at the first rate that misses the targets; no rate "
        "between 1 and 2 was run.",
    ),
    Section(
        "engine_h200.json",
        "On a GPU: steps and prompts, beside vLLM",
        "`python bench/compare_engines.py --json bench/results/engine_h200.json --vllm-site DIR`: one after the other "
        "on one H200, while other GPUs of the host were busy. vLLM was not asked for adapters. Steps with "
        "adapters are from before a product's own launch computed the adapters' part; the next section has newer ones.",
    ),
    Section(
        "engine_adapters_h200.json",
        "On a GPU: steps with adapters",
        "Each sequence of a batch has one of 8 or 64 adapters of rank 16 on all linear layers, in turn. A job "
        "trained on the other GPU of the host.",
    ),
    Section(
        "engine_compressed_h200.json",
        "On a GPU: steps that read compressed weights",
        "`--compress-weights off` beside `on`, which was measured first, on one H200 that had trained until just "
        "before. A prompt's batch reads the weights as they are in both. So does what the floor counts, and a step "
        "that reads fewer bytes can be faster than it.",
    ),
    Section(
        "engine_compressed_h100.json",
        "On a GPU: steps that read compressed weights on an H100",
        "The same on an H100, by a version that read the weights without TMA where they are not compressed.",
        is_earlier=True,
    ),
    Section(
        "resize_h200.json",
        "On a GPU: the KV cache grows and shrinks under load",
        "With a trainer on the other GPU of the host.",
    ),
    Section("soak_cpu.json", "Half an hour of everything at once"),
    Section(
        "soak_h200.json",
        "The same on a GPU, for five minutes",
        "Most of the load is prompts, up to 8,192 tokens; 8 adapters share 4 slots.",
    ),
    Section(
        "finetune_h200.json",
        "On a GPU: training alone, beside PEFT and torchtune",
        "`python bench/compare_finetune.py --batch-sizes 8 --steps 8 --warmup-steps 3 --samples 4 --torchtune-site DIR "
        "--json bench/results/finetune_h200.json`, with `--only` for each of these: each row is a process of its own, "
        "one after the other on one GPU. Memory is at its peak, weights included.",
    ),
    Section(
        "recomputation_h200.txt",
        "On a GPU: training in less and less memory",
        "Micro-batches of sequences of 512 tokens. First in whatever memory they take, then what the planner of memory "
        "chooses for so many GiB, in which what passes within a tasklet counts as well.",
        "python bench/recomputation.py llama-3.1-8b --load-format dummy",
    ),
    Section(
        "finetune_dropout_h200.json",
        "On a GPU: training with dropout",
        "One process after the other. The share is of the matrix rate beside it, which was 774.9 TFLOP/s in the first "
        "and 737.5 in the second: compare shares.",
    ),
    Section(
        "finetune_cut_h200.json",
        "On a GPU: training alone, cut and uncut",
        "Each row is a process of its own, alone on its host; the second was measured some versions later, on another.",
    ),
    Section(
        "finetune_suspend_h200.json",
        "On a GPU: how soon training stops and gives memory back",
        "Micro-batches of 2,048 tokens, two in a step, alone on its host. `stop` and "
        "`require` come at random moments; what was required counts as given once another arena has mapped and cleared "
        "it. Each row is a version of its own on another host: where the second was measured, launching takes the "
        "thread twice the time; since the third, chunks keep their handles while they are mapped, and access is "
        "allowed to four of them at a time.",
    ),
    Section(
        "discards_h200.txt",
        "On a GPU: what discards change in an adapter",
        "In bfloat16 sums come in another order from run to run. Half of the discards also took half of the memory of "
        "activations.",
        "python bench/discards.py llama-3.1-8b --load-format dummy --discards 200",
    ),
)
