"""Both tenants on one GPU: what the targets are judged by, and what it was measured again for."""

from __future__ import annotations

from renderers.section import Section

GRIDS = (
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
        "Sequences decode steadily, without HTTP, and are timed from 832 tokens on, when `adaptive`'s margin has come "
        "to rest; each run is on another card, alone on its machine where nothing else is said. [Earlier "
        "ones](#on-a-gpu-steady-sequences-by-earlier-versions) are on a page of their own. The first was cut off "
        "before its last cell; it counts the training of a cell's first iteration, which those before lack: one of "
        "384. The second is of the version whose decode steps have [attention of their "
        "own](#on-a-gpu-decode-attention-on-some-of-the-sms), and was cut off before its last two cells. Its card's "
        "clocks are higher, which is some of the difference: training alone has 1,630 MHz, where it has 1,571 in the "
        "first. The third is of the version that tries [products' "
        "algorithms](#on-a-gpu-trainings-products-on-some-of-the-sms) in partitions and keeps, of a long answer, no "
        "more than one token's target: at 10 ms TPOT was 10.001, so all 32 sequences count as late. Since then 0.3% of "
        "each token's target is kept besides. The fourth has that, on a card that draws 687 W for decoding alone, "
        "where the third's draws 631: training has 4.1 points less at 10 ms and 1.4 at 40. The fifth is of the "
        "version whose decode steps read [weights by TMA](#on-a-gpu-a-decode-steps-products-on-some-of-the-sms), on a "
        "card with clocks and watts like the third's: serving alone takes 3% less time a token, and training has 0.4 "
        "points less at 10 ms, where 0.02 ms are left to spare, and 0.1 more at 40. A step takes less time, but hardly "
        "less of the board's power. The next two have the same steps on cards that draw 682 and 687 W for decoding "
        "alone: the first was cut off at 40 ms and had the conversation on the host's other card; the second reads "
        "[compressed copies](serving.md#compressed-weights): serving alone takes 7% less time a token than in the one "
        "before, and training has 0.8 points more, on another card. The last does so, too, as it is the default since, "
        "on a card that draws 645 W for decoding alone, while the host's second one had [half of a "
        "trace](#on-a-gpu-half-of-a-trace-for-each-of-two-gpus).",
    ),
    Section(
        "colocate_steady_earlier_h200.json",
        "On a GPU: steady sequences by earlier versions",
        "As in [an earlier run](#on-a-gpu-a-job-beside-requests-policy-by-policy); each run is on another host, whose "
        "other GPUs had other measurements. Sequences are timed when "
        "`adaptive`'s margin has come to rest. In the first run's version a plan counts what its batch waits for "
        "twice, as its own time and as that of the tasklets which it waits for, and so leaves training less where "
        "each iteration has to meet the target by itself. Since the second a batch's time is from when it has its "
        "SMs, and since the third the lane beside a partition's batch is filled before the next one is launched. The "
        "fourth has the version of [the conversation's](#on-a-gpu-a-job-beside-the-conversation-trace) last run, the "
        "fifth that of the grid. In these sequences were timed after 80 to 912 tokens behind prompts of 832, "
        "more at 10 ms and the longer a policy learned: over longer contexts than 1,024, which cost time and energy, "
        "and not the same ones for each policy. In the sixth all begin to be timed at 832, with a margin that other "
        "sequences have taught until it came to rest; the seventh is a later version on a card whose clocks are "
        "lower: training alone has 1,542 MHz, where it has 1,613 in the sixth.",
        is_earlier=True,
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
        "read_energy_h200.txt",
        "On a GPU: what reading the weights costs in energy",
        "What a decode step's products draw beyond a board that waits is for four fifths to bring the matrices in on "
        "48 SMs, and on all of them for nothing else, as far as the board's meter tells. Keys and values are read as "
        "well, and 700 W are 7 J in 10 ms, which training shares: a step that computed for nothing would take a large "
        "part of them. At the lower clocks of both tenants together all costs less. What would move it are fewer bits "
        "a weight, but not those that compression saves (--compress-weights): on all SMs it takes 9% less time and as "
        "many joules, for decoding draws what the memory no longer does, and on 48 it takes 13% more time. That is "
        "alone; [beside a job](#on-a-gpu-what-a-job-has-beside-a-steps-products) it takes as long, and leaves the job "
        "more.",
        "python bench/read_energy.py",
    ),
    Section(
        "beside_steps_h200.txt",
        "On a GPU: what a job has beside a step's products",
        "What a job could have at most from a better kernel for a decode step's products. Each 10 ms some SMs bring "
        "the weights in, by orders to the memory's own engine and without doing anything with them, or multiply with "
        "them for 32 sequences; a job has the other SMs. On 84 of them it has 76% of its speed alone, 62% beside "
        "products with compressed weights, and 58% beside those with the weights themselves, which take as long here."
        " If weights were only brought in it would have 68 and 65%. So decoding and multiplying cost it 5 to 7 "
        "points, or 0.4 to 0.5 of the 7 J that 700 W are in 10 ms. That is about what multiplying takes in any case: "
        "at the 14.8 mJ a token of [products of 2,048 rows](#on-a-gpu-what-reading-the-weights-costs-in-energy), 32 "
        "tokens are 0.47 J. So a better kernel has little to gain there; what compression saves in bytes is 3 points."
        " On 100 SMs a job has more, but then a step's products take most of the 10 ms, and attention is still to "
        "come.",
        "python bench/beside_steps.py",
    ),
    Section(
        "read_energy_h100.txt",
        "On a GPU: what reading the weights costs in energy on an H100",
        "What a decode step's products draw beyond a board that waits is for two thirds to bring the matrices in on "
        "48 SMs, for three quarters on all. Keys and values are read as well, and 700 W are 7 J in 10 ms, which "
        "training shares: a step that computed for nothing would take a large part of them. At the lower clocks of "
        "both tenants together all costs less. What would move it are fewer bits a weight. Compressed without loss "
        "(--compress-weights) they are read in three quarters of the bytes, in 12% less time on 48 SMs and 24% less "
        "on all; of the joules this saves 11 and 15%, for decoding draws some of what the memory no longer does.",
        "python bench/read_energy.py",
        is_earlier=True,
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
        "of a kind, both at their power limit, differ by more than the compression. The fifth is on a third card, by "
        "the first version whose long answers keep no more than one token's target where nothing is missed: its TPOT "
        "is 10.0 ms, and all are in time. Its steps have [attention of their own](#on-a-gpu-decode-attention-on-some-"
        "of-the-sms), as those of the last run [above](#on-a-gpu-steady-sequences-again). The same without compression "
        "was not measured beside it.",
        is_earlier=True,
    ),
    Section(
        "colocate_own_rate_h200.json",
        "On a GPU: the conversation at its own rate",
        "By the version whose decode steps read weights by TMA, 161 requests in each cell. The first run was alone on "
        "its machine. The others are from another card, one behind the other, while the host's second card had other "
        "measurements: with the weights as they are, and with [compressed copies](serving.md#compressed-weights). "
        "With these serving alone takes 12% less time a token, and training has 0.3 points less at 40 ms and 1.8 more "
        "at 10.",
    ),
    Section(
        "colocate_two_gpus_h200.json",
        "On a GPU: half of a trace for each of two GPUs",
        "By the version whose decode steps read compressed copies, `adaptive` alone, at half the traces' rates, a "
        "trace on each of a host's two cards. From this follows what two GPUs train that each serve half of a trace "
        "at its own rate, against one that serves all of it and one that trains alone.",
    ),
    Section(
        "colocate_code_twice_h200.json",
        "On a GPU: the code trace at twice its rate, by a later version",
        "Where `adaptive` is late in [the grid again](#on-a-gpu-the-grid-again-llmstation-in-partitions), with serving "
        "alone, by the version whose decode steps read compressed copies: of 101 requests none is late beside the job "
        "at 15 and 25 ms, and one where nothing trains.",
        is_earlier=True,
    ),
    Section(
        "colocate_newest_h200.json",
        "On a GPU: the grid's places by the newest version",
        "All 24 places of [the grid](#on-a-gpu-the-grid-of-targets-rates-and-traces) where serving alone was in time, "
        "by the version whose decode steps read [compressed copies](serving.md#compressed-weights) where that pays, on "
        "the two cards of one host. Serving alone was not measured again at half the rates, where it was in time with "
        "much to spare in each run before. `adaptive` is in time at all 24: one request is late in all, where one is "
        "late without a job, too. `chunked`, whose tuning it shares, is late at five, all in the code trace at 10 and "
        "15 ms, where it gets 2 to 8% less training all the same; where it is in time it gets 1 to 30% less. So "
        "`adaptive` trains 1.39 times as much on average, a place counting as nothing where the SLO is missed. SMs run "
        "at 1,496 to 1,573 MHz under `adaptive`, where it was 1,539 to 1,671 in the grid. The other policies were "
        "measured beside both [by earlier versions](#on-a-gpu-half-of-the-grid-by-a-later-version).",
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
        is_earlier=True,
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
        is_earlier=True,
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
        "colocate_traced_conv_h200.json",
        "On a GPU: the conversation, traced again",
        "`adaptive` under the conversation by the version of [the newest "
        "grid](#on-a-gpu-the-grids-places-by-the-newest-version), on another card, traced, while a second process "
        "asked the board for its clock and watts every 4 ms.",
    ),
    Section(
        "replayed_conv_h200.txt",
        "On a GPU: iterations replayed, by the version that ran and a later one",
        "[That trace](#on-a-gpu-the-conversation-traced-again), replayed by the version that ran and by one that has "
        "three things from it. Batches with prompts are expected to differ, for a part, from what else is known of "
        "them as the one right before has, as if clocks changed between one run of prompts and the next. Steps right "
        "behind tasklets come out the shorter the longer their contexts are, for they do more beside the last of them: "
        "with one figure for all of them, steps alone, of which there are few, were expected to take too little. And "
        "of tasklets in a row the first takes longest: their mean weighs as much as all of them, or what many take "
        "would be expected to be more. Errors of what is alone are 2.8 to 3.2% on average then, which were 2.9 to 3.9, "
        "and of what is with training 2.5 to 2.8, which were 2.9 to 3.3.",
        "python bench/replay.py conv.json",
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
        is_earlier=True,
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
)
