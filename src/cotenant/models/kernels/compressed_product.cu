// The product of a few rows with a compressed matrix (models/compressed.py), which is decoded on its way from shared
// memory to the tensor cores. compressed_product.py launches it, and has the constants that it is compiled with: ROWS
// (of the input at most: 16, 32 or 64), STAGES, PER_SM (programs that share an SM), LIST_BYTES (of a block at most) and
// OVERLAP. For Hopper (sm_90a).
//
// A program computes 128 columns of the output, or what a part of the input features gives of them. One of its threads
// has blocks, and the input features that they are multiplied with, copied into shared memory by the memory's own engine,
// STAGES of them ahead. The others are a warpgroup. Each of them reads 16 bytes of a block at a time, and what it has then
// decoded is what the tensor cores want of it: the columns' weights come from registers, the rows from shared memory.
// While they multiply with one half of a block the next one is decoded, and the one after that is read. Weights that no
// code stands for are in a list behind the block: the thread that has the place of one puts it there.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int COLUMNS = 128;
constexpr int DEPTH = 64;  // input features of a block
constexpr int WARPS = 4;   // that multiply
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int SUMS = ROWS / 2;             // of a thread, for each half of the columns
constexpr int CODES_AT = COLUMNS * DEPTH;  // behind the lower bytes
constexpr int LIST_AT = CODES_AT + COLUMNS * DEPTH / 2;
constexpr int ENTRIES_AT = 16;  // behind where those of each half of each warp begin and end
constexpr int ROW_BYTES = DEPTH * 2;
constexpr int INPUT_BYTES = ROWS * ROW_BYTES;
constexpr int BLOCK_BYTES = LIST_AT + LIST_BYTES;
constexpr int ALIGNMENT = 1024;  // of the inputs, by their swizzle

__device__ __forceinline__ u32 address_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ uint4 load_16(u32 address) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(address) : "memory");
    return found;
}

__device__ __forceinline__ u32 load_4(u32 address) {
    u32 found;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(address) : "memory");
    return found;
}

// Nothing that registers had before may come after it, nor the other way round.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>  // committed groups that may still be under way
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define SUMS_4(at) "+f"(sums[at]), "+f"(sums[at + 1]), "+f"(sums[at + 2]), "+f"(sums[at + 3])
#define SUMS_16(at) SUMS_4(at), SUMS_4(at + 4), SUMS_4(at + 8), SUMS_4(at + 12)

// [64, 16] from the warpgroup's registers times [16, ROWS] from shared memory
__device__ __forceinline__ void add_product(float (&sums)[SUMS], const u32 (&a)[4], u64 b) {
#if ROWS == 16
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, add, 1, 1, 0;\n}"
        : SUMS_4(0), SUMS_4(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif ROWS == 32
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"
        : SUMS_16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
        : SUMS_16(0), SUMS_16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

// How the tensor cores find input features 0 to 15 of a stage: eight rows of 128 bytes lie behind each other, with their
// pieces of 16 bytes swizzled. 16 features further on it is 2 more.
__device__ __forceinline__ u64 describe(u32 inputs) {
    return (u64)((inputs & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(8 * ROW_BYTES >> 4) << 32 | (u64)1 << 62;
}

struct __align__(64) TensorMap {  // CUtensorMap
    u64 opaque[16];
};

struct Ring {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Shared {
    u32 inputs, blocks, full, empty;

    __device__ __forceinline__ explicit Shared(const void* room) {
        inputs = (address_of(room) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        blocks = inputs + STAGES * INPUT_BYTES;
        full = blocks + STAGES * BLOCK_BYTES;
        empty = full + 8 * STAGES;
    }
};

// Four weights from their lower bytes and a register with their upper ones: sign, and seven bits of the exponent.
__device__ __forceinline__ void interleave(u32 lower, u32 upper, u32& first, u32& second) {
    first = __byte_perm(lower, upper, 0x5140);
    second = __byte_perm(lower, upper, 0x7362);
}

// What a thread has of half a block: of both halves of the columns lower bytes, and codes.
struct Packed {
    uint4 first, second, codes;

    // ``own``: where it begins in the first half.
    __device__ __forceinline__ void load(u32 own, int half) {
        const u32 lower = own + half * (CODES_AT / 2);
        first = load_16(lower);
        second = load_16(lower + CODES_AT / 4);
        codes = load_16(own + CODES_AT + half * (CODES_AT / 4));
    }
};

// Its weights: of two times 16 input features, of both halves of the columns.
__device__ __forceinline__ void decode(u32 (&a)[2][2][4], const Packed& packed, u32 bases) {
    const u32 firsts[4] = {packed.first.x, packed.first.y, packed.first.z, packed.first.w};
    const u32 seconds[4] = {packed.second.x, packed.second.y, packed.second.z, packed.second.w};
    const u32 codes[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
#pragma unroll
    for (int at = 0; at < 4; ++at) {
        u32(&of_step)[2][4] = a[at / 2];
        const int place = at % 2 * 2;
        interleave(firsts[at], (codes[at] & 0x87878787u) + bases, of_step[0][place], of_step[0][place + 1]);
        const u32 turned = __funnelshift_r(codes[at], codes[at], 4);
        interleave(seconds[at], (turned & 0x87878787u) + bases, of_step[1][place], of_step[1][place + 1]);
    }
}

// Weights of a half block that are a warp's, and that no code stands for.
__device__ __forceinline__ void put_listed(u32 (&a)[2][2][4], u32 entries, int from, int to, int lane) {
#pragma unroll 1
    for (int number = from; number < to; ++number) {
        const u32 entry = load_4(entries + 4 * number);
        if (entry % 32 != lane) continue;
        const u32 bytes = entry & 32 ? 0x5410 : 0x3254, value = entry >> 16, which = entry / 64 % 16;
#pragma unroll
        for (int each = 0; each < 16; ++each) {
            u32& pair = a[each / 8][each / 4 % 2][each % 4];
            if (which == each) pair = __byte_perm(pair, value, bytes);
        }
    }
}

__device__ __forceinline__ u16 rounded(float x) {
    u16 found;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(x));
    return found;
}

__device__ __forceinline__ void store(
    const float (&sums)[2][SUMS], const u16* bias, void* out, bool is_float, int first_row, int first_column,
    int num_rows, int num_out, int lane) {
#pragma unroll
    for (int each = 0; each < 4; ++each) {
        const int half = each / 2, eight = each % 2, column = first_column + half * 64 + eight * 8 + lane / 4;
        const float add = bias == nullptr ? 0.0f : __uint_as_float((u32)bias[column] << 16);
#pragma unroll
        for (int place = 0; place < ROWS / 4; ++place) {
            const int row = place / 2 * 8 + lane % 4 * 2 + place % 2;
            const long long at = (long long)(first_row + row) * num_out + column;
            const float sum = sums[half][place / 2 * 4 + 2 * eight + place % 2] + add;
            if (row < num_rows) {
                if (is_float)
                    ((float*)out)[at] = sum;
                else
                    ((u16*)out)[at] = rounded(sum);
            }
        }
    }
}

// What one thread does: for each of ``count`` blocks, and the input features from ``depth`` on. Nothing writes to blocks
// while steps run: the first are on their way before what the kernel before has written can be read.
__device__ void copy(const Shared& shared, const TensorMap& x, int depth, const u8* blocks, u32 bytes, int count) {
    u64 policy;  // nobody reads the matrix again before the next step, so it need not displace what is read again
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    auto copy_block = [&](int stage) {
        const u32 full = shared.full + 8 * stage;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes + INPUT_BYTES) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
                "r"(shared.blocks + stage * BLOCK_BYTES), "l"(blocks), "r"(bytes), "r"(full), "l"(policy) : "memory");
        blocks += bytes;
    };
    auto copy_inputs = [&](int stage) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                "r"(shared.inputs + stage * INPUT_BYTES), "l"(&x), "r"(depth), "r"(0), "r"(shared.full + 8 * stage)
            : "memory");
        depth += DEPTH;
    };
    const int ahead = min(count, STAGES);
    for (int stage = 0; stage < ahead; ++stage) copy_block(stage);
#if OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int stage = 0; stage < ahead; ++stage) copy_inputs(stage);
    Ring ring;
    for (int number = STAGES; number < count; ++number, ring.next()) {
        wait(shared.empty + 8 * ring.stage, ring.parity);
        copy_block(ring.stage);
        copy_inputs(ring.stage);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) compressed_product(
    const __grid_constant__ TensorMap x, const u8* blocks, const u16* bias, void* out, int num_rows, int num_out,
    int num_in, int splits, int block_bytes, int base, int is_float) {
    extern __shared__ u8 room[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Shared shared(room);
    const int row = blockIdx.x / splits, split = blockIdx.x % splits;
    const int first = num_in / DEPTH * split / splits, count = num_in / DEPTH * (split + 1) / splits - first;
#if OVERLAP
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(shared.full + 8 * stage, 1);
            init_barrier(shared.empty + 8 * stage, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        const u8* from = blocks + ((long long)row * (num_in / DEPTH) + first) * block_bytes;
        if (lane == 0) copy(shared, x, first * DEPTH, from, block_bytes, count);
        return;
    }
    const u32 bases = base * 0x01010101u, own = shared.blocks + (warp * 32 + lane) * 16;
    const u32 list = shared.blocks + LIST_AT, own_list = list + 4 * warp;
    float sums[2][SUMS];
#pragma unroll
    for (int each = 0; each < 2 * SUMS; ++each) sums[each / SUMS][each % SUMS] = 0.0f;
    Ring ring;
    wait(shared.full, 0);
    Packed packed;  // of the next half
    packed.load(own, 0);
    u32 listed = load_4(own_list);
    int before = -1;  // the stage whose products may still be under way
    for (int left = count; left > 0; --left) {
        const int stage = ring.stage;
        const u64 inputs = describe(shared.inputs + stage * INPUT_BYTES);
        const u32 of_this = listed;
        ring.next();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[2][2][4];
            decode(a, packed, bases);
            if (half == 0) packed.load(own + stage * BLOCK_BYTES, 1);
            const int from = of_this >> 16 * half & 0xff, to = of_this >> 16 * half + 8 & 0xff;
            if (from != to) put_listed(a, list + stage * BLOCK_BYTES + ENTRIES_AT, from, to, lane);
            begin_products();
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int columns = 0; columns < 2; ++columns)
                    add_product(sums[columns], a[step][columns], inputs + 2 * (2 * half + step));
            commit_products();
            if (half == 1 && left > 1) {
                wait(shared.full + 8 * ring.stage, ring.parity);
                packed.load(own + ring.stage * BLOCK_BYTES, 0);
                listed = load_4(own_list + ring.stage * BLOCK_BYTES);
            }
            wait_for_products<1>();
            if (half == 0 && before >= 0 && lane == 0) arrive(shared.empty + 8 * before);
        }
        before = stage;
    }
    wait_for_products<0>();
    store(sums, split == 0 ? bias : nullptr, out, is_float, split * num_rows, row * COLUMNS + warp * 16, num_rows, num_out,
          lane);
}
