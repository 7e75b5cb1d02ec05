"""Both tenants on one GPU: on the way to a decision, or beside other ways of sharing."""

from __future__ import annotations

from renderers.section import Section

DECISIONS = (
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
)
