"""Parts of the server by themselves."""

from __future__ import annotations

from renderers.section import Section

PARTS = (
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
        "A layer of Llama-3.1-8B, whose sequences lie in the server's pages: microseconds, by kernel and the number of "
        "SMs that it has. `own` serves; `fa2` did before it, and of FlashInfer's no other is faster on fewer SMs for "
        "many sequences. For those of 4,096 tokens, where all SMs read them, `fa2` still takes 5% less. First with "
        "FlashInfer's kernels alone, then, on another host, with `--kernel own --kernel fa2`.",
        "python bench/decode_attention.py --shapes 32x1000,32x545,8x1024,64x512,1x1000,1x4096,32x4096 --sms "
        "32,48,64,80 --json attention.json",
    ),
    Section(
        "skinny_tilings_h200.txt",
        "On a GPU: a decode step's products on some of the SMs",
        "Products of 32 rows with Llama-3.1-8B's matrices, while training's products run on the other SMs, and alone "
        "where all are theirs. What is chosen (columns of a program by input features of a turn, and how many turns "
        "are on their way), and the fastest cut with copies by TMA and with copies by the threads; all have the same "
        "bits. A layer's four take 5% less time on 48 SMs, 3% on 32 and 13% on 16 than the fastest with copies by the "
        "threads, and as much on 80 and on all. What is chosen on all SMs was changed afterwards: one stage fewer, "
        "and 64 columns for the largest.",
        "python bench/skinny_tilings.py --rows 32",
    ),
    Section(
        "lane_products_h200.txt",
        "On a GPU: training's products on some of the SMs",
        "The large products of a layer of Llama-3.1-8B, forward and backward, where training has a part of the SMs: "
        "by the algorithm that torch's library takes for all of them, by what it takes when it is told how many there "
        "are, and by the fastest of those that it names for so many or for all. In use each is timed in the job's own "
        "layers (`models/lane_products.py`), beside the batches that the partition is for. All have torch's bits.",
        "python bench/lane_products.py --sms 100,84,68",
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
        is_earlier=True,
    ),
    Section(
        "planner_rounds_again_h200.txt",
        "On a sixth GPU's host: what a plan costs, in rounds",
        "Again, when a step's time in a partition is kept from plan to plan. Most rounds had a core that others had, "
        "too: a prediction that takes 3.1 µs in one takes 6.6 in another.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_objects_h200.txt",
        "On a seventh GPU's host: what a plan costs, in rounds",
        "Since then a job's table of costs is asked anew in every other plan, and equal micro-batches are the same "
        "objects. Intel(R) Xeon(R) Processor, 16 cores, nothing else running.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_turns_h200.txt",
        "On an eighth GPU's host: what a plan costs, in rounds",
        "The version whose turns look no further than they have to, and which asks its models of as many features as "
        "there are. Intel(R) Xeon(R) Processor, 32 cores, nothing else running.",
        "python bench/planner_cost.py --calls 300",
        is_earlier=True,
    ),
    Section(
        "planner_found_h200.txt",
        "On a ninth GPU's host: what a plan costs, in rounds",
        "The version that looks for a chunk's size where the last one was found. Intel(R) Xeon(R) Processor, 16 "
        "cores, nothing else running.",
        "python bench/planner_cost.py",
        is_earlier=True,
    ),
    Section(
        "planner_heap_h200.txt",
        "On a GPU's host: what planning costs, places in the heap of turns",
        "This host is slower than the one before, and less steady: rows of which nothing was changed take 1.1 to 1.5 "
        "times as long, and its rounds differ by 1.6 times.",
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
