"""The files under bench/results/ that have a place on the pages, in the order of these, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """The heading of a results file. ``note`` stands below it; text files have their ``command`` here. ``is_earlier``:
    by versions that were measured again since, or on the way to a decision; a page of its own has these."""

    file: str
    title: str
    note: str = ""
    command: str = ""
    is_earlier: bool = False


SECTIONS = (
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
        "engine_compressed_h100.json",
        "On a GPU: steps that read compressed weights",
        "`--compress-weights off` beside `on`, which was measured first, on one H100. The floor counts the bytes of "
        "the weights as they are, so a step that reads fewer can be faster than it.",
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
    Section(
        "colocate_h200.json",
        "On a GPU: a job beside requests, policy by policy",
        "Sequences decode steadily, through the worker's own loop in one process, without HTTP. Harvest is training's "
        "speed as a share of what it reaches alone in the same run; latencies are p50 / p99. Other GPUs of the host "
        "ran other measurements and tests at the same time. From before `adaptive` counted a change of partition over "
        "several steps and bounded young answers token by token.",
        is_earlier=True,
    ),
    Section(
        "colocate_steady_h200.json",
        "On a GPU: steady sequences again",
        "Sequences decode steadily, without HTTP, as in [an earlier "
        "run](#on-a-gpu-a-job-beside-requests-policy-by-policy); each run is on another host, whose other GPUs had "
        "other measurements. Sequences are timed when "
        "`adaptive`'s margin has come to rest. In the first run's version a plan counts what its batch waits for "
        "twice, as its own time and as that of the tasklets which it waits for, and so leaves training less where "
        "each iteration has to meet the target by itself. Since the second a batch's time is from when it has its "
        "SMs, and since the third the lane beside a partition's batch is filled before the next one is launched. The "
        "fourth has the version of [the conversation's](#on-a-gpu-a-job-beside-the-conversation-trace) last run, the "
        "fifth that of the grid, see below. In these, and "
        "in the other runs of steady sequences here, these were timed after 80 to 912 tokens behind prompts of 832, "
        "more at 10 ms and the longer a policy learned: over longer contexts than 1,024, which cost time and energy, "
        "and not the same ones for each policy. In the sixth all begin to be timed at 832, with a margin that other "
        "sequences have taught until it came to rest; the seventh is a later version on a card whose clocks are "
        "lower: training alone has 1,542 MHz, where it has 1,613 in the sixth. The eighth is later still, alone on its "
        "machine, and was cut off before its last cell; it counts the training of a cell's first iteration, which the "
        "others lack: one of 384.",
    ),
    Section(
        "colocate_steady_h100.json",
        "On a GPU: steady sequences whose slack is saved up",
        "On an H100, whose memory has two thirds of an H200's bandwidth, so that a decode step costs a third more: "
        "compare with nothing above. One run behind the other on one GPU; on the host's other one the fixed split was "
        "measured, see below. In the first `adaptive` spends slack at nearly each step, in the second it saves it up, "
        "where the longest gap leaves room to, for leaving a partition costs as much for a few tasklets as for many: "
        "one point at 40 ms, none at 25, and gaps between tokens that are as long as --slo-itl-ms allows.",
        is_earlier=True,
    ),
    Section(
        "read_energy_h100.txt",
        "On a GPU: what reading the weights costs in energy",
        "What a decode step's products draw beyond a board that waits is for two thirds to bring the matrices in on "
        "48 SMs, for three quarters on all. Keys and values are read as well, and 700 W are 7 J in 10 ms, which "
        "training shares: a step that computed for nothing would take a large part of them. At the lower clocks of "
        "both tenants together all costs less. What would move it are fewer bits a weight. Compressed without loss "
        "(--compress-weights) they are read in three quarters of the bytes, in 12% less time on 48 SMs and 24% less "
        "on all; of the joules this saves 11 and 15%, for decoding draws some of what the memory no longer does.",
        "python bench/read_energy.py",
    ),
    Section(
        "colocate_compressed_h100.json",
        "On a GPU: steady sequences that read compressed weights",
        "On an H100, `--compress-weights off` and below it `on`, which was measured first. Steps without training are "
        "11% shorter, harvest is the same within a point: 0.5 more at 15 and at 25 ms, 0.6 less at 40.",
        is_earlier=True,
    ),
    Section(
        "colocate_compressed_conv_h100.json",
        "On a GPU: the conversation whose steps read compressed weights",
        "On the host's other H100, in the same order: the median TPOT of serving alone falls by 13% at both rates, "
        "harvest gains one point at the trace's own rate and half a point at twice that.",
        is_earlier=True,
    ),
    Section(
        "colocate_steady_compressed_h200.json",
        "On a GPU: steady sequences on two H200s, with weights compressed and as they are",
        "On one H200 `--compress-weights off` and below it `on`, which `llmstation` gains most by, for it does nothing "
        "beside a step: 4.3 points at 10 ms; `adaptive` has 1.8 more there and as much as before at 40. Then `on` "
        "twice on another H200, where the same version has 2.2 and 2.3 points less at 10 ms, and 0.9 at 40: two cards "
        "of a kind, both at their power limit, differ by more than the compression.",
    ),
    Section(
        "colocate_conv_h200.json",
        "On a GPU: a job beside the conversation trace",
        "36 s of Azure's conversation trace of 2023, at a rate near its mean and at twice that. The first run was cut "
        "off after the first policy of the second rate, the second one before the last. Other GPUs of the host ran "
        "other measurements and tests at the same time. `adaptive` as above.",
        is_earlier=True,
    ),
    Section(
        "colocate_grid_h200.json",
        "On a GPU: the grid of targets, rates and traces",
        "101 requests or more in each cell (12 to 122 s) of Azure's conversation and code traces of 2023, from second "
        "626 on, where both come at about their mean rates: at their own, twice, half and four times the rate. On "
        "H200s, four of a host side by side, a target on each: `python bench/measure.py --gpus 4 --out measured "
        "colocate-grid`. Where prompts fill the device, at twice the conversation's rate, and at four times and 40 "
        "ms, each policy was measured three times in turn, and twice in the code trace at 10 and 15 ms, where one "
        "late request of a hundred decides whether a place counts: such a cell is all of its runs, and the table has "
        "the least and the most harvest of them. Policies of a place are of one process, but for `static` in the code "
        "trace at 10 and 15 ms and, at half the rate, 40 ms. All is since prompts are held for what running requests "
        "have saved up (`adaptive` alone does that), on several hosts. The code trace at 10 and 15 ms and, at twice "
        "and four times its rate, at 40 ms is of the second; the conversation at 10 ms, at twice its rate, and "
        "`static`'s last cell are of a third. The conversation at 10 ms is, at its own and half its rate, of a "
        "fourth. On the last two SMs run at 1,657 to 1,671 MHz under the conversation, on the first at 1,539 to 1,572 "
        "under the same limit, so what is had there is more by that, under any policy. The fourth has a version that "
        "leaves prompts 0.03 of a decode step where targets are tight, not 0.05; what that changes cannot be told "
        "from what the cards do. Where serving alone misses the SLO nothing else was measured: eight of the 32 "
        "places, where prompts fill the device (four times the rate of either trace, but for the conversation at 40 "
        "ms) or short answers have no time for a prompt that comes in between (the code trace at twice its rate and "
        "10 ms). In the 24 others `adaptive` is in time, `harli` in 23, `llmstation` in 22, `chunked` in 19, `static` "
        "in 8. In 23 of them `adaptive` has most harvest of those in time, by up to 9%; in the 24th, the conversation "
        "at its own rate and 10 ms, it is 0.7% behind `harli`. The average over places counts one as nothing where "
        "the SLO is missed, and that hangs on single requests: `chunked` has two late of 202 in the code trace at "
        "half its rate and 15 ms, as many as may be, and had four of 101 [on the first "
        "host](#on-a-gpu-the-code-trace-at-tight-targets-on-another-host), where `llmstation` was in time there and "
        "`harli` was not at half the rate and 10 ms. All that train share how prompts' chunks are sized and how late "
        "requests may be. `llmstation` ran a backward's tasklets behind the steps here, in all cells; [later "
        "versions](#on-a-gpu-the-grid-again-llmstation-in-partitions) run them in parallel with the step where that is "
        "faster. Requests "
        "that were live at the end of a cell had the device to themselves from there on. Training alone ran at "
        "16,073 to 16,586 tokens/s: policies are compared by harvest. Two cards of a kind, both at their power "
        "limit, differ by some points, as steady sequences above show. First tokens come later than alone for "
        "prompts that are held: their median under the conversation at its own rate and 40 ms is 72 ms for 35, the "
        "99th percentile 192 for 145. Beside a job few batches have the device alone, most of them with prompts, so "
        "a cell's prediction error alone rests on few, down to 31: its p95 is above 10% in 5 of the 24 cells, up to "
        "14.1%. That of batches that training shares is 8.1% at most. The second table says what bounds training. "
        "Prompts take what they take alone at the clocks that the power limit leaves, and more where they go by "
        "small chunks: under the conversation up to 22% at 10 ms, where training leaves them 0.03 of a step, and 7% "
        "at 15. A decode step costs training 3.1 to 6.1 ms where it takes 4.4 to 5.5 alone (at four times the rate "
        "9.0, 8.1 alone): under the conversation at its own rate and 40 ms, 4.5 for 4.8, and 6.3 under `chunked`, "
        "so that prompts have 23% of the time there and decode steps 10. More is to be had of steps that read fewer "
        "bytes or are fewer, of prompts that the prefix cache has, and of a board that may draw more. What these "
        "figures do not show: much of what `adaptive` goes by was chosen by simulating these seconds of the "
        "conversation.",
    ),
    Section(
        "colocate_again_h200.json",
        "On a GPU: the grid again, `llmstation` in partitions",
        "Most places of [the grid](#on-a-gpu-the-grid-of-targets-rates-and-traces), by a version whose `llmstation` "
        "runs a backward's tasklets in parallel with the step where that is faster: the four policies that come near "
        "each other, two targets a card, on two cards of another host, from no latencies at all. Under the same limit "
        "SMs run at lower clocks there: under the conversation and `adaptive` at 1,514 to 1,603 MHz, in the grid at "
        "1,539 to 1,671. The time was up in the code trace: of twice its rate two policies are missing at 25 and 40 "
        "ms, of half its rate all. Serving alone and four times the rates were not measured. Beside `chunked`, which "
        "is as it was, `llmstation` trains more than it did: under the conversation by 2.9 to 4.7 points at 10 ms and "
        "1.8 to 3.6 at 15, where it was 0.6 less to 1.2 more and 0.3 less to 1.5 more; at 25 and 40 ms by 0.3 to 1.2, "
        "where it was 0.9 less to 0.2 more. `adaptive` has most harvest of those in time under the conversation and "
        "the code trace at its own rate, in all 16 places. In the code trace at twice its rate it is late at 10, 15 "
        "and 25 ms, and so are the others that were measured, but for `llmstation` at 10, with one late request where "
        "`adaptive` has three. Serving alone is late there in the grid, so in what was aimed at, above, that place "
        "does not count; the averages below count it.",
    ),
    Section(
        "colocate_half_h200.json",
        "On a GPU: half of the grid by a later version",
        "[The grid's](#on-a-gpu-the-grid-of-targets-rates-and-traces) two traces at their own rate and at twice that, "
        "all six policies of a place by one version on one card: two targets each on two cards of a host, from no "
        "latencies at all, `static` last. Since [the grid again](#on-a-gpu-the-grid-again-llmstation-in-partitions) "
        "steps behind tasklets are kept apart from steps alone, a request counts once for the margin that is learned, "
        "and what was disturbed is not learned from. Serving alone is late at one of the 16 places, the code trace at "
        "twice its rate and 10 ms, which the lines below count and what was aimed at, above, does not. At the 15 "
        "others `adaptive` has all requests in time; `harli` is in time at all 15, `llmstation` at 13, `chunked` at "
        "11, `static` at 3. `adaptive` has most harvest of those in time at 14 of them, by up to 6%; at the 15th, the "
        "conversation at twice its rate and 10 ms, it is 0.1% behind `harli`. `harli`, whose steps are always in "
        "partitions, is within 2% of it at 10 ms and 15 to 22% behind at 40; `chunked` and `llmstation` are 2 to 6% "
        "behind at 40 and 4 to 31% at 10: where the target says which way of sharing is best, `adaptive` is about as "
        "good as that. Of batches alone 2.0% are predicted with more than 10% of error, where it was 4.1% in the grid "
        "again, and few of these are decode steps. The grid's other rates are in two sections below, [the "
        "conversation's](#on-a-gpu-the-conversation-at-half-and-four-times-its-rate-by-a-later-version) and [the code "
        "trace's](#on-a-gpu-the-code-trace-at-half-its-rate-by-a-later-version): what was aimed at is judged by all "
        "three together, too.",
    ),
    Section(
        "colocate_others_h200.json",
        "On a GPU: the policies that the grid leaves out",
        "The conversation at its own rate and at twice that, on a card of the host "
        "[above](#on-a-gpu-half-of-the-grid-by-a-later-version) and in the same hour. `fineinfer`, `lifecycle` and "
        "`temporal` train between requests alone, and with a request live nearly all the time that is next to "
        "nothing; `fineinfer` holds those that come while none is, up to its share of the TTFT target, and so has "
        "somewhat more, and at the trace's own rate later first tokens. `multitask` is LLMStation's Algorithm 1 with "
        "all tasklets behind the steps, by a fixed margin: `chunked` and `llmstation` above have more of the same "
        "slack.",
    ),
    Section(
        "colocate_rest_h200.json",
        "On a GPU: the conversation at half and four times its rate by a later version",
        "The rates that [half of the grid](#on-a-gpu-half-of-the-grid-by-a-later-version) leaves out, with all its "
        "policies but `static`, on a card whose host tested this version on its other one. `adaptive` is in time "
        "where serving alone is, at five of the eight places, and trains most at each: at half the rate 2 to 5% more "
        "than the next, `llmstation` or, at 10 ms, `harli`, and at four times the rate 2%. Where serving alone is "
        "late nothing else was measured. The time was up before `chunked` at 10 ms and half the rate: that is by a "
        "still later version, on [the next section's](#on-a-gpu-the-code-trace-at-half-its-rate-by-a-later-version) "
        "host, and so is `adaptive` there, which had 56.2% where `harli` and `llmstation` were measured.",
    ),
    Section(
        "colocate_code_half_h200.json",
        "On a GPU: the code trace at half its rate by a later version",
        "The last of the grid's rates: 10 ms on one card of a host, the other targets on the other, while that one "
        "had other measurements before. `adaptive` has all requests in time at all four; of those in time it trains "
        "most, 0.2 to 1.0% more than the next. At 10 ms `llmstation` and `chunked` are late, and at 15 all others are.",
    ),
    Section(
        "colocate_between_h200.json",
        "On a GPU: the grid's places beside training between requests",
        "All 24 places of [the grid](#on-a-gpu-the-grid-of-targets-rates-and-traces) where serving alone is in time, "
        "by a version later than those, all five policies of a place on one card, on the four cards of one more host: "
        "`adaptive` and serving alone, `fineinfer` and `lifecycle`, which [half of "
        "it](#on-a-gpu-half-of-the-grid-by-a-later-version) leaves out, and `static`, also where only that half had "
        "it. `adaptive` is in time at all of them, with one request late in all, where one is late without a "
        "job, too. `fineinfer` and `lifecycle`, which train while nobody asks, are in time everywhere as well: where "
        "answers are a line, as in the code trace, `adaptive` trains 1.07 to 1.74 and 1.15 to 2.01 times as much; "
        "under the conversation somebody asks nearly all the time, and it trains at least 2.8 times as much. "
        "`fineinfer` holds who comes while nobody is served, for up to its share of the TTFT target: that brings it "
        "more training than `lifecycle` has, and costs a tenth of a second of TTFT at the median under the code trace "
        "at half its rate. `static` is in time at 8 of the 24. At tight targets harvest under the conversation goes "
        "with the clocks that a card has under its limit of 700 W: at half its rate and 15 ms `adaptive` has 64.3% at "
        "1,550 MHz here and 66.2% at 1,609 in [the run "
        "before](#on-a-gpu-the-conversation-at-half-and-four-times-its-rate-by-a-later-version), and at 10 ms 53.6% at "
        "1,542 and, in the grid, 56.5% at 1,657. Of the averages over two GPUs this is the one of three that is below "
        "what was aimed at. The versions differ, too.",
    ),
    Section(
        "colocate_traced_h200.json",
        "On a GPU: places of the grid that were traced",
        "By a later version, `adaptive` and `chunked`, one run behind the other on a card whose host had other "
        "measurements on its second one. Each wrote with --trace-file what the worker did: files of 1.2 to 2.1 MB "
        "compressed.",
    ),
    Section(
        "replayed_h200.txt",
        "On a GPU: iterations replayed",
        "What a predictor says of [these traces'](#on-a-gpu-places-of-the-grid-that-were-traced) iterations that knows "
        "nothing else. The last line of each is of batches with prompts, without training: the best linear function "
        "of what the predictor's model of them goes by, fitted to these batches afterwards, errs by 2.7 to 3.0%; the "
        "predictor, which has not seen a batch when it is asked of it, by 2.6 to 3.2%. So there is little to be had "
        "from a line of these features that is learned in another way.",
        "python bench/replay.py conv-adaptive.json conv-chunked.json code-adaptive.json",
    ),
    Section(
        "colocate_predicted_h200.json",
        "On a GPU: errors of prediction over the grid",
        "[The grid's](#on-a-gpu-the-grid-of-targets-rates-and-traces) cells under `adaptive` alone, by a version that "
        "predicts prompts with one feature more and sizes their chunks by whole tiles: two targets a card, on two "
        "cards of one host, each rate at both targets before the next. Nothing else had served these loads in either "
        "process before. The time was up before the last cell, the code trace at half its rate and 40 ms, whose p95 "
        "alone is 10.2% in the grid; the lines about two GPUs lack it, too. Eight of the 31 are of places where "
        "serving alone misses the SLO, which the grid leaves out: they count below, and not in what was aimed at, "
        "above. In one of these, the conversation at four times its rate and 25 ms, the p95 of what training shares "
        "is 11.6%.",
    ),
    Section(
        "colocate_code_once_h200.json",
        "On a GPU: the code trace at tight targets on another host",
        "The same version as [in the grid](#on-a-gpu-the-grid-of-targets-rates-and-traces), 101 requests a cell, so "
        "that one may be late and two may not: which of the others is in time changes from run to run, what each of "
        "them trains hardly does.",
        is_earlier=True,
    ),
    Section(
        "colocate_late_h200.json",
        "On a GPU: a place that serving alone did not serve in time",
        "The conversation at twice its rate and 10 ms, three rounds of 12 s on one of the cards of the grid's last "
        "run (its part `crowded-10`): without a job 13 of 366 requests are late, by first tokens that came after up "
        "to 2.3 s or by TPOT up to 10.9 ms. Gaps between tokens are short, so nothing stood still: prompts waited. In "
        "the grid is another run of this place, in which serving alone was in time.",
        is_earlier=True,
    ),
    Section(
        "colocate_four_h200.json",
        "On a GPU: bursts that leave a tenth of the time",
        "12 s of the conversation at four times its rate and 40 ms, where prompts have more than four fifths of the "
        "time: three processes on H200s, before prompts were held for what running requests have saved up. The first "
        "two ran side by side, other measurements and tests on the host's other cards, and measured each policy three "
        "times in turn. The third, on another host, measured each once. `adaptive` has 8.2, 7.7 and 8.6% harvest and "
        "`harli` 8.2, 8.0 and 9.0: 0.5, 3.7 and 4.4% behind, or 5, 35 and 47 ms of 12 s. Single cells of `adaptive` "
        "have 7.2 to 8.6% and such of `harli` 7.7 to 9.0. Prompts leave 15 to 18% of the time under both. By "
        "simulation, requests that joined cost `adaptive` what it had saved up. Since that is spent first, it has "
        "7.8% [in the grid](#on-a-gpu-the-grid-of-targets-rates-and-traces), three runs of each, and `harli` 7.6.",
        is_earlier=True,
    ),
    Section(
        "colocate_order_h100.json",
        "On a GPU: how far one cell can be trusted",
        "12 s of the conversation at twice its rate and 15 ms, five processes on H100s, four of them side by side: "
        "policies in other orders, and last the first place of a grid, before the others and on the same host. Each "
        "process had served 4 s under each policy before, and the whole load under `adaptive` and `harli` (now it is "
        "8 s under each). `adaptive` has 18.8 to 24.3% harvest and `harli` 21.4 to 24.8, on average 21.6 and 22.6; "
        "one cell of `harli`'s has two of 122 late and misses the SLO. Within a process `adaptive` is from 14% behind "
        "to 3% ahead. The last process and the two below were the first on their cards since the machine had been "
        "started: in all three whoever was measured first is behind, by 8 to 14%. The other four were the second on "
        "the same machine: of `adaptive` and `harli`, the one measured before the other is there from 2% behind to 6% "
        "ahead. The reason, as far as the code and the time at which it ends tell: until FlashInfer's faster kernels "
        "for prompts are compiled, where they never were, they go through others, and compilers have some of the "
        "cores (`models/attention_kernels.py`), and these measurements did not wait for that. In the first two "
        "seconds the longest batches under `inference-only` take 4 to 6% longer in the last process than in the "
        "fourth (25.9 ms for 24.7, 29.2 for 27.7), decode steps as long. That is little, but bursts fill the device "
        "here: a decode step of 7.5 ms leaves little of 15, so such prompts wait longer, go by smaller chunks and "
        "have 51% of the time for 42. Errors of prediction are no larger for it. `bench colocate` waits now: [in the "
        "grid](#on-a-gpu-the-grid-of-targets-rates-and-traces) this place is again among the first of its process, "
        "and `adaptive` is 3.4% ahead of `harli` there. In the four processes that had these kernels `adaptive` has "
        "22.3% on average and `harli` 22.9, and cards differ by more than that: no process measured a policy twice, "
        "for which there is `--rounds`.",
    ),
    Section(
        "colocate_order_long_h100.json",
        "On a GPU: the same in longer cells",
        "25 s of the same, two policies in either order, each on a card of its own beside tests on the host's other "
        "two: who comes first is behind in both, by 12 and 8%. They differ in the second to tenth second alone: by "
        "then, it seems, the kernels were there.",
    ),
    Section(
        "colocate_grid_h100.json",
        "On a GPU: the grid on an H100, since training goes on beside a batch when somebody comes",
        "12 s of the same seconds, all in one version, on two H100s of one host side by side, as far as the device "
        "time went: 15 of the places where serving alone meets the SLO have all policies; of the code trace at half "
        "its rate one target was run, at twice its rate none, and the conversation at four times its rate at 40 and "
        "10 ms. `adaptive` trains most in 13 of the 15, by 1.2 to 8.4% more than the best other, and is 2.8% behind "
        "`harli` in one, the conversation at twice its rate and 15 ms. In the last, the code trace at its own rate "
        "and 25 ms, it loses one request of 32 (an answer whose TPOT is 26.5 ms), so that the place counts as 0: in "
        "12 s one is 3%. Without that place it has 1.08 times the harvest of `chunked`, 1.12 of `harli` and 1.18 of "
        "`llmstation`, which are 0 in others. `static` meets the SLO in 7 places, where `adaptive` has 1.84 to 2.39 "
        "times its harvest. The prediction errors of what is shared are 1.9 to 3.8% under `adaptive`, their p95 5 to "
        "10%, and 11.6% in one place.",
        is_earlier=True,
    ),
    Section(
        "colocate_beside_h100.json",
        "On a GPU: training beside a batch when somebody comes",
        "On two H100s of one host side by side. In the first run's version a message ends the tasklets beside a batch, "
        "for the rest of that batch and for what was launched behind it; in the second's they go on until it lands. "
        "Both wrote down each iteration's prediction. All requests are in time in both. Errors of prediction fall, "
        "too: a step beside training is that from its beginning to its end.",
        is_earlier=True,
    ),
    Section(
        "colocate_fill_h100.json",
        "On a GPU: the lane is filled before prompts are launched",
        "On two H100s of one host side by side, each with both versions one behind the other: since and before on the "
        "first, before and since on the second. A batch that goes to other SMs than the one in flight, as prompts do, "
        "takes the host a while to launch; before, the tasklets beside the one in flight lasted for a fraction of "
        "that. Harvest differs by -0.6 and -0.8 points on the first GPU and by +2.1 and +1.1 on the second: 0.7 and "
        "0.1 more on average at twice the rate and at its own, which is within what two runs differ by. The errors of "
        "prediction of what is shared fall at twice the rate in all four, from 3.1 to 2.6%, and their p95 from 8.9 "
        "and 10.1 to 6.4 and 7.2%: what is planned beside a batch is there.",
        is_earlier=True,
    ),
    Section(
        "colocate_grid_p99_h100.json",
        "On a GPU: one target of the grid, with enough requests in each cell for a p99",
        "25 ms, 101 requests or more in each cell (12 to 61 s), on two H100s of one host, a trace on each, in the "
        "version that sizes prompt chunks by what requests are ahead, also right behind training, and captures the "
        "larger ones. `adaptive` is in time wherever serving alone is, and has 4.2 to 7.5% more harvest than the best "
        "other under the conversation and 1.8% more under the code trace, where one of 101 requests is late, as "
        "without a job. Of that trace half the rate alone was run, for serving alone misses the SLO at the others, and "
        "there `static` is missing: device time was over. So the averages leave that place out.",
        is_earlier=True,
    ),
    Section(
        "colocate_code_h200.json",
        "On a GPU: the code trace, whose bursts begin with short answers",
        "The place of the code trace of the section above, on an H200, since the first of a burst is in time as the "
        "others are (`scheduler/chunking.py`): all 101 requests, with a job as without, 1.4% more harvest than the "
        "best other in time. The run was cut off in `static`'s cell.",
        is_earlier=True,
    ),
    Section(
        "colocate_prompts_h200.json",
        "On a GPU: short questions",
        "Prompts of 32 to 160 tokens, 16 and 64 a second (`python bench/short_prompts.py short.csv`): batches that "
        "read all weights and compute little. First with tasklets beside batches of up to 256 rows as well, in a "
        "partition, where that was to get training further (`adaptive` of commit 4c1af35); then behind them alone, as "
        "it is now. In turn on one GPU in one process, two rounds of each cell. Beside prompts training gets 0.1 to "
        "0.5 points of harvest less, which at 64 a second is within what rounds differ by, and at 16 a second and 25 "
        "ms the median first token comes 5 ms later.",
        is_earlier=True,
    ),
    Section(
        "colocate_short_h100.json",
        "On a GPU: short answers that prompts come into",
        "101 requests in each cell of the code trace, 257 of the conversation, on H100s. First four places of which "
        "`adaptive` missed two in the run below: all are in time since a request has a say in the size of prompts' "
        "chunks from when its first token is in flight, and chunks count what they attend to "
        "(`scheduler/chunking.py`). Below it, of the version before the former, on two cards of one host, the code "
        "trace with all policies: `adaptive` is in time in four of the six places where serving alone is, with 2.6 "
        "to 5.3% more harvest than the best other in time in three, and in one it alone is; at half the rate two of "
        "101 are late at 25 and at 15 ms, where the others lose six or more at 15 and were not run at 25. Device "
        "time was over before the last cells. Last, in the same version, the conversation at four times its rate, "
        "twice: two of 257 are late on this card when serving alone, and three or four under those that train, all "
        "under `static`: none of these meets the SLO. Of those with three late `adaptive` has most harvest.",
        is_earlier=True,
    ),
    Section(
        "colocate_crowd_h200.json",
        "On a GPU: bursts of prompts that cannot all be in time",
        "101 to 257 requests a cell on one H200: the version that puts prompts off where not all first tokens can be "
        "in time (`scheduler/turns.py`), and below it the one that serves them in the order in which they came. Of "
        "the code trace at four times its rate 91.4% are in time alone and 90.8% beside a job, for 68.7 and 67.5% "
        "before, with as much harvest and as soon a median of first tokens. The 99th percentile comes at 1.9 and 1.8 "
        "s instead of 0.9 and 1.0: fewer are late, and these wait longer. At twice the rate it is TPOT that is "
        "missed, which the order of prompts does not mend. Everywhere else all but one or two are in time. That "
        "first tokens come later under the conversation at four times its rate, where nearly all are in time with "
        "both, goes with how long prompts took, which differs from run to run: 85% of the time, and 82 in the second "
        "version's. In the grid above it is 83 to 85%.",
    ),
    Section(
        "colocate_static_h100.json",
        "On a GPU: the fixed split, whose prompts are captured",
        "12 s of the grid's conversation on an H100, since prompts' pieces are captured for `static`'s partition: its "
        "training goes on beside them, and requests are late.",
        is_earlier=True,
    ),
    Section(
        "colocate_profile_h200.json",
        "On a GPU: where the device's time goes beside the conversation trace",
        "10 s of the grid's conversation at its own rate and twice that, all targets in one process on a host with "
        "nothing else on it, but for the last cell: the run was cut off there. In the second table, `rest` is also the "
        "time in which the tasklets of a partition go on with no batch beside them. The third says which resource is "
        "spent: the board is at its power limit nearly all of the time, and most of it while it only serves. Kernels "
        "were chosen as for the [steady sequences](#on-a-gpu-steady-sequences-again). The run below it, on another "
        "host, chose none; in both a step "
        "in a partition could be made up for by 8 tokens. The two after that ran one behind the other on a third "
        "host: the version before batches with prompts had a model of their own, and batches behind a tasklet in "
        "flight a wait, and the one since. Compare their prediction errors; most batches alone beside a job are those "
        "with prompts.",
        is_earlier=True,
    ),
    Section(
        "colocate_long_h200.json",
        "On a GPU: 521 requests of the conversation trace",
        "Its seconds 626 to 726 at their own rate, twice and four times that, so that a p99 can be stated at each; "
        "each run on another host, with other measurements on its other GPU since the second. How much less is aimed "
        "at where prompts crowd (`scheduler/crowding.py`) was chosen by simulating these seconds and others of the "
        "same trace. In the first run many chunks at four times the rate came out a tile smaller than slack allows, "
        "which is mended in the second. The third has the version of the steady sequences' third run. In the fourth "
        "prompts are predicted by a model that follows the last few, answers are not held to their first tokens where "
        "none is short, and steps in partitions may make requests later than before; cells end once each request has "
        "tokens enough to be judged by. How late requests may be, what prompts leave and how fast that model follows "
        "were chosen by simulating these seconds, and by replaying iterations of the first 40 of them. At four times "
        "the rate serving alone missed more there than in the runs before: 23 requests, where it was 6 to 12. What "
        "made it so is not known. The fifth, on a host with nothing else on it, has the version in which chunks keep "
        "within what requests are ahead also right behind training and the first of a burst is in time: 1.6 points "
        "more harvest than the fourth at four times the rate, 0.9 and 0.2 less at twice and at its own.",
        is_earlier=True,
    ),
    Section(
        "colocate_tight_h200.json",
        "On a GPU: the conversation trace at tight targets",
        "25 s of the same seconds, in the version of their last run. At twice the rate and 10 ms the first tokens of "
        "6 of 265 requests are late under either policy; where nothing trains one request misses, by its TPOT. The "
        "second run is that place again, since chunks may take a little more of what requests are ahead, and on "
        "another host: three miss where nothing trains, 14 and 15 beside a job.",
        is_earlier=True,
    ),
    Section(
        "fused_products_h200.txt",
        "On a GPU: what fusing a decode step into a forward would save",
        "Microseconds of a layer's four products. Fused into 2,048 tokens' products a decode step of 32 sequences "
        "saves 65 of its 142, for together they leave the tile grid, and 121 where there are 2,016: that in each "
        "layer that the two have in common, while the job is in a forward pass. The first rows are by the "
        "script's first version, which let go of the products' inputs once graphs had their addresses: what was "
        "multiplied may have been other numbers. Run for a second each, at the clocks that the board's power "
        "leaves them, fusing saves 56 us a layer with 2,048 tokens and 86 with 2,016, of 1.6 ms that a layer's "
        "forward takes there; forwards are 42% of training's time. So all that fusing could add is 1.5 to 2.3% of "
        "training's speed, were every layer of every micro-batch to run in a decode step.",
        "python bench/fused_products.py",
    ),
    Section(
        "sharing_h200.json",
        "On a GPU: the server and PEFT's training in two processes",
        "Loads as of the grid, over HTTP. `mps-100`: both on one GPU under NVIDIA MPS, neither limited, which trains "
        "7,572 and 8,363 tokens/s at the trace's own and half its rate. `separate`: two GPUs, each by itself. "
        "Training is PEFT with Liger's cross entropy, not compiled, 12,794 tokens/s alone; harvest is a share of "
        "that. `mps-100` trains as much whatever the target is; it is in time at 25 and 40 ms and misses 15 and 10. "
        "In the grid `adaptive` trains 10,604 and 12,569 tokens/s at 40 ms and 9,852 and 11,818 at 25, all in time. "
        "With 80% or 60% of the SMs for the server torch's products are wrong, see below, so there are no such cells: "
        "earlier runs had some, in which parts of the products were left out. Other measurements ran on the other "
        "GPUs of the host.",
    ),
    Section(
        "sharing_liger_h200.json",
        "On a GPU: the same two processes with all of Liger's kernels",
        "A later version of the server, and PEFT with all of Liger's kernels for this model, on another host: first "
        "as torch runs it, then compiled. Alone it trains 15,625 and 15,531 tokens/s, 1.2 times what it does above, "
        "and under MPS 10,208 and 10,169 at the conversation's own rate, 11,152 and 11,162 at half of it, whatever "
        "the target is. That is in time at 40 ms, and at half the rate at 25; nowhere else. "
        "[Traced](#on-a-gpu-places-of-the-grid-that-were-traced) `adaptive` has 10,618 tokens/s at the own rate and "
        "40 ms, 4% more, and 9,900 at 25, where MPS is late with 37 and 45% of the requests; [on the same "
        "host](#on-a-gpu-the-conversation-at-half-and-four-times-its-rate-by-a-later-version) and at half the rate "
        "12,916 at 40 ms, 12,224 at 25 and 10,873 at 15. So two processes share about as "
        "well at 40 ms and the trace's own rate; at half the rate `adaptive` trains 10 to 16% more where they are in "
        "time. They know of no target, and have the weights twice.",
    ),
    Section(
        "sharing_separate_h200.json",
        "On a GPU: a server and training with all of Liger's kernels, a GPU for each",
        "By a later version, on one card of another host: training alone, which came to 3% less there, and then the "
        "server alone.",
    ),
    Section(
        "demo_h200.txt",
        "On a GPU: the demo",
        "The built-in model, whose heads are 32 wide, on one card of a host that had tests on its other one. Targets "
        "are four times the medians without the job. Since rows of the KV cache have room for the heads that "
        "FlashInfer has kernels for, its steps are captured like other models'. The version before served it by "
        "torch's own attention, operation by operation: its median TPOT alone was 13.2 ms, a quarter of its target, "
        "seven times as long, and with the job half of the first requests were late. The table is the printed one, "
        "without its frame.",
        "cotenant demo --corun-seconds 25",
    ),
    Section(
        "mps_products_h200.txt",
        "On a GPU: matrix products under MPS with a part of the SMs",
        "Nothing of this project runs there but the check: torch's own products of bf16 matrices, into memory that "
        "holds no number before, against sums made element by element. Elements that were not written are found in "
        "all rows, others that are wrong in 16 of them. A server whose products fail it does not start "
        "(`models/product_check.py`), and `bench/compare_sharing.py` leaves such shares out. Partitions by green "
        "contexts, in which `adaptive` shares, are another thing, for a process of all SMs makes them: there such "
        "products are right, for both tenants (`tests/gpu/test_partitions.py`).",
        "python bench/mps_products.py 100 95 90 80 60 40 20",
    ),
    Section(
        "decode_attention_h200.txt",
        "On a GPU: decode attention on some of the SMs",
        "A layer of Llama-3.1-8B, whose sequences lie in the server's pages: microseconds, by FlashInfer's kernel and "
        "the number of SMs that it has. `fa2` serves; no other is faster on fewer SMs for many sequences.",
        "python bench/decode_attention.py --shapes 32x1000,8x1024,64x512 --sms 32,48,64 --json attention.json",
    ),
    Section(
        "start_up_h200.txt",
        "On a GPU: a server's start",
        "With every cache of compiled kernels empty and nothing else on the host, then with what that start left. The "
        "third has another empty home folder on the same host. The last two were on a host of two GPUs, with training "
        "on the other one. 25 s are wanted.",
        "python bench/start_up.py llama-3.1-8b --load-format dummy",
    ),
    Section(
        "job_start_h200.txt",
        "On a GPU: what jobs and adapters that come and go do to requests",
        "16 sequences decode, and a job begins. The gap between two tokens that is planned for is three times the TPOT "
        "target at most: 45 ms, 180 with `--enforce-eager`, whose steps take longer. First a version without a "
        "rehearsal, whose first job kept the loop for 108 ms with one launch; then one with it. The script said the "
        "same figures in other words then, and noted where its thread was, which slowed it a little. Then with "
        "checkpoints and adapters, which no version before had been measured with: tokens were up to 453 ms apart. "
        "Since then large copies go by small pinned pieces, files are read and written without keeping the "
        "interpreter, graphs are let go of little by little, and no tasklet begins 5% behind its plan's end; then "
        "copies are freed as huge pages, by which a job's end is shorter. At last what a job trains is laid out on the "
        "thread that reads its files (`start` keeps the loop for 5 to 7 ms in place of 22 to 47), and a layer's memory "
        "is mapped when its forward runs.",
        "python bench/job_start.py llama-3.1-8b --load-format dummy --slo-tpot-ms 15 --save-steps 2 --adapters 3",
    ),
    Section(
        "held_up_h200.txt",
        "On a GPU: what keeps launches waiting",
        "One thread launches, another does what is said, on a GPU that is busy. As torch copies to pageable memory "
        "behind other work, the driver lets nobody ask for that work's events, nor launch behind it, until the copy is "
        "over; and nobody launches anything while it makes pinned memory.",
        "python bench/held_up.py",
    ),
    Section(
        "held_interpreter_cpu.txt",
        "What keeps a thread waiting for the interpreter",
        "On a CPU. A thread sleeps for 0.2 ms, again and again, while another one does what is said. With Python's own "
        "interval of 5 ms it would wait for that long wherever another thread runs Python; the worker's is 0.02 ms. "
        "What one call in C does cannot be interrupted, whatever the interval is: to read tensors by safetensors, to "
        "collect garbage among very many objects (the worker keeps its own out of that), to decode JSON. Last, what it "
        "takes to free memory.",
        "python bench/held_interpreter.py",
    ),
    Section(
        "profile_h200.txt",
        "On a GPU: what `cotenant profile` measures, and how long it takes",
        "On one card of a host, while the other one measured cells of the grid; three minutes at most were aimed at.",
        "cotenant profile llama-3.1-8b --load-format dummy --tasklet-tokens 2048",
    ),
    Section(
        "planner_h200.txt",
        "On a GPU's host: what a plan costs",
        "Intel(R) Xeon(R) Processor, four of 32 cores, beside measurements on the GPUs.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_slow_h200.txt",
        "On a slower GPU's host: what a plan costs",
        "Later, on 16 of 32 cores, beside the start of a measurement: a call of the predictor that finds a record "
        "takes 2.4 times what it takes above, and so does a plan. With more rows. A plan is made while the device has "
        "a batch in flight.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_later_h200.txt",
        "On a third GPU's host: what a plan costs by a later version",
        "Intel(R) Xeon(R) Processor, all of 32 cores, with nothing else running. The core's speed changes during the "
        "run: a call of the predictor that finds a record takes 1.3 times what it takes on the first host, and some of "
        "the plans half of what they take on the second, others as long.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_leaner_h200.txt",
        "On a fourth GPU's host: what a plan costs with less Python in it",
        "A later version: what is made for each plan is of kinds that cost less to make, and what does not change "
        "from one plan to the next is asked once. Plans are the same. How much of the difference "
        "to the third host is the host's is not known: calls of the predictor that find a record take as long as "
        "there, or half. Measurements ran on the host's other card.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_rounds_h200.txt",
        "On a fifth GPU's host: what a plan costs, in rounds",
        "A later version, whose predictions of prompts are sums that are written out. All kinds of calls in turn, ten "
        "times: how far the rounds' medians lie apart is how much of a core others had. Nothing else ran.",
        "python bench/planner_cost.py",
    ),
    Section(
        "planner_rounds_again_h200.txt",
        "On a sixth GPU's host: what a plan costs, in rounds",
        "Again, when a step's time in a partition is kept from plan to plan. Most rounds had a core that others had, "
        "too: a prediction that takes 3.1 µs in one takes 6.6 in another.",
        "python bench/planner_cost.py",
    ),
    Section("adapter_h200.json", "On a GPU: a job's adapter in PEFT and in vLLM"),
    Section(
        "gpu_serving_h200.txt",
        "On a GPU: parts of the server",
        "What the tests print: growing and shrinking the KV cache; the sampler at a vocabulary of 128,256; a step's "
        "layers with LoRA adapters of rank 16; the device's wait between decode steps of an 8B model; and for small "
        "random models of each family the error of the chosen tokens' log-probabilities against transformers in "
        "float32, beside the error that transformers itself has in the same half precision. From before kernels began "
        "while the one before ends.",
        "python -m pytest tests/gpu -s",
        is_earlier=True,
    ),
    Section(
        "gpu_tests_h200.txt",
        "On a GPU: training beside serving",
        "The shapes of Llama-3.1-8B with random weights serve, train and end with an adapter; a small model gives the "
        "CPU's tokens and losses. From before decode steps were captured.",
        "make test-gpu",
        is_earlier=True,
    ),
)
