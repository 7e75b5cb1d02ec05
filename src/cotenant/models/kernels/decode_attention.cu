// Attention of sequences with one new token each over the paged KV cache. decode_attention.py launches it, and has the
// constants that it is compiled with: WIDTH of a head in the cache, KV_HEADS, GROUP (query heads of each), PAGE_TOKENS,
// WINDOW (0: none), IS_BF16 (else float16), WARPS of a program, STAGES, PER_SM (programs that share an SM) and OVERLAP.
//
// A unit of work is a chunk of a sequence (models/decode_chunks.py) for one key head and up to eight of its query heads.
// A program takes every gridDim.x-th. Its warps share a unit's tiles of 16 tokens, each warp for itself: it reads its
// next STAGES tiles ahead into shared memory, across units, so memory never waits for what is computed. Scores are made
// transposed, keys times queries, for there are eight columns of queries in a product of the tensor cores, not sixteen.
// A warp keeps the maximum and the sum of each head's weights as it goes. When a unit ends, the warps' sums are added up
// in shared memory. Where a sequence has several chunks, the program that is told that it is the last one adds up theirs.

typedef unsigned short half_t;
typedef unsigned int u32;

constexpr int TILE = 16;
constexpr int MOST_HEADS = 8;  // query heads of a unit
constexpr int SUBGROUPS = (GROUP + MOST_HEADS - 1) / MOST_HEADS;
constexpr int ITEMS = KV_HEADS * SUBGROUPS;  // units of a chunk
constexpr int QUERY_HEADS = KV_HEADS * GROUP;
constexpr int STEPS = WIDTH / 16;  // products that a head is wide
constexpr int OWN_STEPS = (STEPS + WARPS - 1) / WARPS;  // that a warp adds up for all
constexpr int ROW_BYTES = WIDTH * 2;
constexpr int KEY_BYTES = TILE * ROW_BYTES;  // of a tile; its values lie behind them
constexpr int PIECES = WIDTH / 8;  // of 16 bytes in a row
constexpr int ROWS_AT_ONCE = 32 / PIECES;
constexpr int TOKEN_STRIDE = KV_HEADS * WIDTH;
// A lane has the sums of two heads. Of four heads those of every other pair of lanes are of use.
constexpr int LANES = GROUP <= 4 ? 16 : 32;

struct Chunk {  // as models/decode_chunks.py writes it
    int row, begin, end, pages, part, parts, first, length;
    __device__ int tiles() const { return (end - begin + TILE - 1) / TILE; }
};

struct Sums {  // of heads 2 * (lane % 4) and the next one
    float most[2], total[2];  // the largest score; the weights' sum
    float4 values[STEPS];  // features 16 * step + lane / 4 of both heads, and those 8 further on
};

__device__ __forceinline__ Chunk load_chunk(const int* lists, int number) {
    const int4* at = reinterpret_cast<const int4*>(lists) + 2 + 2 * number;
    const int4 a = __ldg(at), b = __ldg(at + 1);
    return Chunk{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ void wait_for_previous() {
#if OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sixteen bytes, or as many zeros.
__device__ __forceinline__ void copy(u32 to, const half_t* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ u32 transposed(u32 a) {
    u32 found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(a));
    return found;
}

#if IS_BF16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

// [16, 16] times [16, 8]
__device__ __forceinline__ void add_product(float4& sum, const u32 (&a)[4], u32 low, u32 high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 found;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
    return found;
}

__device__ __forceinline__ float power_of_two(float x) {
    float found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
    return found;
}

// Scores where nothing is seen are minus infinity; so no difference of two of them is asked for.
__device__ __forceinline__ float nothing() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(fmaxf(a, b), -1e30f); }

// Over the lanes that have the same heads.
__device__ __forceinline__ float most_of_lanes(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// What a warp reads ahead: its tiles of one unit after the other.
struct Ahead {
    const int* lists;
    const half_t* cache;
    long long page_stride;
    int num_units, warp, lane;
    int unit, tile, page;  // page: of the tile, or with smaller pages of its token lane % 16
    Chunk chunk, next;  // next: of the unit after this one, loaded before it is wanted

    __device__ Ahead(const int* lists, const half_t* cache, long long page_stride, int num_units, int warp, int lane)
        : lists(lists), cache(cache), page_stride(page_stride), num_units(num_units), warp(warp), lane(lane) {
        load_next(blockIdx.x);
        begin(blockIdx.x);
    }

    __device__ bool has_tile() const { return unit < num_units; }
    // Only the tile of a sequence's last token is written to by the kernel before.
    __device__ bool is_newest() const { return tile == chunk.tiles() - 1 && chunk.end == chunk.length; }

    __device__ __forceinline__ void find_page() {
        int token = chunk.begin + tile * TILE;
        if (PAGE_TOKENS < TILE) token = min(token + lane % TILE, chunk.end - 1);
        page = __ldg(lists + chunk.pages + token / PAGE_TOKENS);
    }

    __device__ __forceinline__ void load_next(int unit) {
        if (unit < num_units) next = load_chunk(lists, unit / ITEMS);
    }

    // Units that have no tile for this warp are left out.
    __device__ __forceinline__ void begin(int first) {
        for (unit = first; has_tile(); unit += gridDim.x) {
            chunk = next;
            load_next(unit + gridDim.x);
            if (warp < chunk.tiles()) break;
        }
        tile = warp;
        if (has_tile()) find_page();
    }

    // Each call is a group of copies, if perhaps an empty one. Rows lie with their pieces in an order in which eight
    // rows' pieces of the same features are in different banks.
    __device__ __forceinline__ void fetch(u32 slot) {
        if (has_tile()) {
            const int token = chunk.begin + tile * TILE, piece = lane % PIECES;
            const half_t* head = cache + unit % ITEMS / SUBGROUPS * WIDTH + piece * 8;
#pragma unroll
            for (int first = 0; first < TILE; first += ROWS_AT_ONCE) {
                const int row = first + lane / PIECES;
                const int from_page = PAGE_TOKENS < TILE ? __shfl_sync(~0u, page, row) : page;
                const half_t* from = head + from_page * page_stride + (token + row) % PAGE_TOKENS * TOKEN_STRIDE;
                const u32 to = slot + row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
                copy(to, from, token + row < chunk.end);
                copy(to + KEY_BYTES, from + PAGE_TOKENS * TOKEN_STRIDE, token + row < chunk.end);
            }
            tile += WARPS;
            if (tile < chunk.tiles()) find_page();
            else begin(unit + gridDim.x);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

__device__ __forceinline__ void load_queries(u32 (&found)[2 * STEPS], const half_t* query, int row, int item, int lane) {
    const int in_group = item % SUBGROUPS * MOST_HEADS + lane / 4;
    const long long head = (long long)row * QUERY_HEADS + item / SUBGROUPS * GROUP + in_group;
    const half_t* from = query + head * WIDTH + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i)
        found[i] = in_group < GROUP ? *reinterpret_cast<const u32*>(from + i * 8) : 0;
}

// Add a tile's tokens, the first of which is ``first``.
__device__ __forceinline__ void attend(
    Sums& sums, u32 slot, const u32 (&queries)[2 * STEPS], const Chunk& chunk, int first, float scale, int lane) {
    const int key_row = lane % 16, value_row = lane % 8 + lane / 16 * 8;
    const u32 keys = slot + key_row * ROW_BYTES + ((lane / 16 ^ (key_row & 7)) << 4);
    const u32 values = slot + KEY_BYTES + value_row * ROW_BYTES + ((lane / 8 % 2 ^ (value_row & 7)) << 4);
    float4 even = {0, 0, 0, 0}, odd = {0, 0, 0, 0};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_matrices(a, keys ^ (step << 5));
        add_product(step % 2 ? odd : even, a, queries[2 * step], queries[2 * step + 1]);
    }
    float scores[4] = {even.x + odd.x, even.y + odd.y, even.z + odd.z, even.w + odd.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = first + lane / 4 + i / 2 * 8;
        const bool is_seen = token < chunk.end && (WINDOW == 0 || token >= chunk.length - WINDOW);
        scores[i] = is_seen ? scores[i] * scale : nothing();
    }
    float shrink[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        const float most = larger(sums.most[head], most_of_lanes(fmaxf(scores[head], scores[head + 2])));
        shrink[head] = power_of_two(sums.most[head] - most);
        sums.most[head] = most;
        scores[head] = power_of_two(scores[head] - most);
        scores[head + 2] = power_of_two(scores[head + 2] - most);
        sums.total[head] = sums.total[head] * shrink[head] + scores[head] + scores[head + 2];
    }
    const u32 low = transposed(rounded(scores[0], scores[1])), high = transposed(rounded(scores[2], scores[3]));
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            sums.values[step].x *= shrink[0], sums.values[step].y *= shrink[1];
            sums.values[step].z *= shrink[0], sums.values[step].w *= shrink[1];
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        load_transposed(a, values ^ (step << 5));
        add_product(sums.values[step], a, low, high);
    }
}

__device__ __forceinline__ void add(float4& sum, const float4& part, const float (&weight)[2]) {
    sum.x += part.x * weight[0], sum.y += part.y * weight[1];
    sum.z += part.z * weight[0], sum.w += part.w * weight[1];
}

// What another program wrote is not read through this one's cache.
template <bool IS_SHARED, class T>
__device__ __forceinline__ T load(const T* from) {
    return IS_SHARED ? *from : __ldcg(from);
}

// Of a unit's warps or a sequence's chunks, added up: each warp has steps of its own.
struct Total {
    float most[2], total[2];
    float4 values[OWN_STEPS];

    // ``states``: of each part the largest score and the weights' sum of each head; ``sums``: of each part [STEPS, LANES].
    template <bool IS_SHARED>
    __device__ __forceinline__ void add_up(
        const float2* states, int states_stride, const float4* sums, int sums_stride, int parts, int warp, int lane) {
        const int pair = lane % 4, place = LANES == 32 ? lane : lane / 4 * 2 + pair;
        const bool is_kept = LANES == 32 || pair < 2;
        most[0] = most[1] = nothing(), total[0] = total[1] = 0;
#pragma unroll 4
        for (int part = 0; part < parts; ++part)
#pragma unroll
            for (int head = 0; head < 2; ++head)
                most[head] = larger(most[head], load<IS_SHARED>(states + part * states_stride + 2 * pair + head).x);
#pragma unroll
        for (int i = 0; i < OWN_STEPS; ++i) values[i] = float4{0, 0, 0, 0};
#pragma unroll 4
        for (int part = 0; part < parts; ++part) {
            float weight[2];
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                const float2 state = load<IS_SHARED>(states + part * states_stride + 2 * pair + head);
                weight[head] = power_of_two(state.x - most[head]);
                total[head] += state.y * weight[head];
            }
#pragma unroll
            for (int i = 0; i < OWN_STEPS; ++i) {
                const int step = warp + i * WARPS;
                if (step < STEPS && is_kept)
                    add(values[i], load<IS_SHARED>(sums + part * sums_stride + step * LANES + place), weight);
            }
        }
    }

    // All lanes call it. ``head``: the first of the unit's ``num_heads`` in all of ``out``.
    __device__ __forceinline__ void store(half_t* out, long long head, int num_heads, int warp, int lane) const {
        half_t* to = out + (head + lane / 4) * WIDTH + lane % 4 * 2;
        const float scale[2] = {1.f / total[0], 1.f / total[1]};
#pragma unroll
        for (int i = 0; i < OWN_STEPS; ++i) {
            const float4 found = values[i];
            const u32 low = transposed(rounded(found.x * scale[0], found.y * scale[1]));
            const u32 high = transposed(rounded(found.z * scale[0], found.w * scale[1]));
            const int step = warp + i * WARPS;
            if (step < STEPS && lane / 4 < num_heads) {
                *reinterpret_cast<u32*>(to + step * 16) = low;
                *reinterpret_cast<u32*>(to + step * 16 + 8) = high;
            }
        }
    }

    // For whoever adds up the chunks.
    __device__ __forceinline__ void keep(float2* states, float4* sums, int warp, int lane) const {
        const int pair = lane % 4;
        if (LANES == 32 || pair < 2) {
#pragma unroll
            for (int i = 0; i < OWN_STEPS; ++i) {
                const int step = warp + i * WARPS;
                if (step < STEPS) __stcg(sums + step * LANES + (LANES == 32 ? lane : lane / 4 * 2 + pair), values[i]);
            }
        }
        if (warp == 0 && lane < 4)
            for (int head = 0; head < 2; ++head) __stcg(states + 2 * pair + head, float2{most[head], total[head]});
    }
};

// ``lists``: the chunks, and behind them the pages. ``sums`` [chunks, ITEMS, STEPS, LANES] and ``states`` [chunks, ITEMS,
// MOST_HEADS] are for sequences of several chunks, and ``counters`` [sequences, ITEMS] for the chunks that are done,
// which are zero before and after. ``scale``: of scores that are powers of two.
extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM) decode_attention(
    const half_t* query, const half_t* cache, long long page_stride, const int* lists, float4* sums, float2* states,
    int* counters, half_t* out, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_units = __ldg(lists) * ITEMS;
    float4* warp_sums = reinterpret_cast<float4*>(shared + WARPS * STAGES * 2 * KEY_BYTES);  // [WARPS, STEPS, LANES]
    float2* warp_states = reinterpret_cast<float2*>(warp_sums + WARPS * STEPS * LANES);  // [WARPS, MOST_HEADS]
    int* told = reinterpret_cast<int*>(warp_states + WARPS * MOST_HEADS);
    const u32 ring = static_cast<u32>(__cvta_generic_to_shared(shared)) + warp * (STAGES * 2 * KEY_BYTES);
#if OVERLAP
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    Ahead ahead(lists, cache, page_stride, num_units, warp, lane);
    bool has_waited = false;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (!has_waited && ahead.has_tile() && ahead.is_newest()) wait_for_previous(), has_waited = true;
        ahead.fetch(ring + stage * 2 * KEY_BYTES);
    }
    if (!has_waited) wait_for_previous();
    if (blockIdx.x >= num_units) return;

    // A chunk that is not its sequence's only one is written, then counted, then it is known whether it was the last:
    // each when the next unit ends, so that nothing waits for memory.
    int written = -1, counted = -1, count = 0;  // units; what the counter was, which the first thread knows
    auto settle = [&] {  // behind a barrier, with ``count`` in ``told``
        if (counted >= 0) {
            const Chunk chunk = load_chunk(lists, counted / ITEMS);
            const int item = counted % ITEMS;
            if (*told == chunk.parts - 1) {
                __threadfence();
                if (threadIdx.x == 0) counters[chunk.row * ITEMS + item] = 0;
                const long long first = (long long)chunk.first * ITEMS + item;
                Total total;
                total.add_up<false>(states + first * MOST_HEADS, ITEMS * MOST_HEADS, sums + first * STEPS * LANES,
                                    ITEMS * STEPS * LANES, chunk.parts, warp, lane);
                const int in_group = item % SUBGROUPS * MOST_HEADS;
                const long long head = (long long)chunk.row * QUERY_HEADS + item / SUBGROUPS * GROUP + in_group;
                total.store(out, head, GROUP - in_group, warp, lane);
            }
        }
        if (written >= 0 && threadIdx.x == 0) {
            __threadfence();
            count = atomicAdd(counters + load_chunk(lists, written / ITEMS).row * ITEMS + written % ITEMS, 1);
        }
        counted = written, written = -1;
    };

    Chunk chunk = load_chunk(lists, blockIdx.x / ITEMS);
    u32 next_queries[2 * STEPS];
    load_queries(next_queries, query, chunk.row, blockIdx.x % ITEMS, lane);
    int stage = 0;
    for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        u32 queries[2 * STEPS];
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) queries[i] = next_queries[i];
        Chunk next = chunk;
        if (const int after = unit + gridDim.x; after < num_units) {
            next = load_chunk(lists, after / ITEMS);
            load_queries(next_queries, query, next.row, after % ITEMS, lane);
        }
        Sums mine = {{nothing(), nothing()}, {0, 0}, {}};
        for (int tile = warp; tile < chunk.tiles(); tile += WARPS) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            __syncwarp();
            const u32 slot = ring + stage * 2 * KEY_BYTES;
            attend(mine, slot, queries, chunk, chunk.begin + tile * TILE, scale, lane);
            __syncwarp();
            ahead.fetch(slot);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        __syncthreads();  // the last unit's sums have been read
        if (threadIdx.x == 0) *told = count;
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float total = sum_of_lanes(mine.total[head]);
            if (lane < 4) warp_states[warp * MOST_HEADS + 2 * lane + head] = float2{mine.most[head], total};
        }
        if (LANES == 32 || lane % 4 < 2) {
            float4* to = warp_sums + warp * STEPS * LANES + (LANES == 32 ? lane : lane / 4 * 2 + lane % 4);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) to[step * LANES] = mine.values[step];
        }
        __syncthreads();
        settle();
        Total total;
        total.add_up<true>(warp_states, MOST_HEADS, warp_sums, STEPS * LANES, WARPS, warp, lane);
        const int item = unit % ITEMS, in_group = item % SUBGROUPS * MOST_HEADS;
        if (chunk.parts == 1) {
            const long long head = (long long)chunk.row * QUERY_HEADS + item / SUBGROUPS * GROUP + in_group;
            total.store(out, head, GROUP - in_group, warp, lane);
        } else {
            const long long own = (long long)(chunk.first + chunk.part) * ITEMS + item;
            total.keep(states + own * MOST_HEADS, sums + own * STEPS * LANES, warp, lane);
            written = unit;
        }
        chunk = next;
    }
    while (written >= 0 || counted >= 0) {
        __syncthreads();
        if (threadIdx.x == 0) *told = count;
        __syncthreads();
        settle();
    }
}
