// What a warp of the fragment attention does with its tokens, and how the softmaxes of several become one.
//
// A warp takes 16 tokens of each turn, with a softmax of its own. A turn's keys and values, a row each, are brought to its
// part of shared memory by bulk copies, one a lane, which hold up no other load of the multiprocessor. The query heads are
// the rows of mma.m16n8k16. Dimensions are permuted so that a thread reads 16 bytes at a time, just what it feeds to the
// tensor core: of the keys, within 32, thread t of a row's four takes the 8 from 8t on; of the values, within 64, each
// column of a product takes every eighth. The probabilities are in place for the second product as the first left them.
//
// Needs, by -D: ELEMENT (0 bf16, 1 fp16), KV_HEADS, GROUP (query heads of a key head, at most 4), WARPS, and HAS_NORM, 0 or
// 1. Heads are 128 wide.

#include "fragments.cuh"

constexpr int DIM = 128, THREADS = WARPS * 32, TURN = WARPS * 16;
// Bytes between two keys, and between two values, whose banks 16 keep apart; bytes of a warp's turn.
constexpr int KEY_BYTES = 256, VALUE_BYTES = 272, WARP_BYTES = 16 * (KEY_BYTES + VALUE_BYTES);
constexpr int STAGE_BYTES = WARPS * WARP_BYTES;
constexpr int MERGED = DIM + 2;  // Floats of a softmax: its sum, its largest score in units of log2(e), its total.
// Stands for minus infinity, finite so that a difference of two is not NaN.
constexpr float LOWEST = -1.0e30f;

// A warp's softmax so far; a thread has dimensions 64 h + 16 t + 8 n + j of query head g in [h][j][n].
struct Softmax {
    float top, total;
    float sum[2][8][4];
};

// Rows 8 to 15 of the first operand are zero: no query heads are there.
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a2, u32 b0, u32 b1) { multiply(sum, a0, 0, a2, 0, b0, b1); }

__device__ __forceinline__ void init_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(barrier), "r"(parity) : "memory");
    __syncwarp();
}

__device__ __forceinline__ void copy_row(u32 to, const u16* from, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(to), "l"(from), "r"(barrier) : "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over the four threads of a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ void unpack(float (&to)[8], uint4 from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = widen(u16(words[i]));
        to[2 * i + 1] = widen(u16(words[i] >> 16));
    }
}

__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
    return make_uint4(narrow(from[0], from[1]), narrow(from[2], from[3]), narrow(from[4], from[5]), narrow(from[6], from[7]));
}

// Brings a warp's next 16 tokens to `to`, of which `count` are tokens; `first` is the first one's row of the cache. What was
// there has been read. `barrier` turns when all have arrived.
__device__ __forceinline__ void copy_tokens(u32 to, u32 barrier, const u16* k_cache, const u16* v_cache, u64 first, int count) {
    const int lane = threadIdx.x % 32, token = lane % 16;
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(min(count, 16) * 512) : "memory");
    if (token >= count) return;
    const u64 from = (first + token * KV_HEADS) * DIM;
    if (lane < 16) copy_row(to + token * KEY_BYTES, k_cache + from, barrier);
    else copy_row(to + 16 * KEY_BYTES + token * VALUE_BYTES, v_cache + from, barrier);
}

// What a thread norms and rotates its part of a head by.
struct Rotation {
    float cosines[2][8], sines[2][8];
#if HAS_NORM
    uint4 weights[4];
#endif
};

// For row g of the first product, a query head, or the new key as row GROUP; `angles` [DIM] are the cosines of the first half
// of the dimensions, then sines.
__device__ __forceinline__ Rotation load_rotation(const u16* q_norm, const u16* k_norm, const float* angles) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Rotation by;
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            by.cosines[c][j] = angles[32 * c + 8 * t + j];
            by.sines[c][j] = angles[64 + 32 * c + 8 * t + j];
        }
#if HAS_NORM
#pragma unroll
    for (int c = 0; c < 4; c++) by.weights[c] = *reinterpret_cast<const uint4*>((g < GROUP ? q_norm : k_norm) + 32 * c + 8 * t);
#endif
    return by;
}

// Norms and rotates the raw query heads of a request, and its new key on the way as row GROUP; begins the softmax, with
// the new token in the warp that `owns` it and writes it to the cache.
//   heads, key, value: [GROUP, DIM], [DIM], [DIM], raw
//   new_key, new_value: [DIM], of the cache
__device__ __forceinline__ Softmax begin_softmax(
    uint4 (&q)[4], const u16* heads, const u16* key, const u16* value, const Rotation& by, u16* new_key, u16* new_value, bool owns,
    float to_log2, float eps) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u16* head = g < GROUP ? heads + g * DIM : key;
    float x[4][8];
#pragma unroll
    for (int c = 0; c < 4; c++) unpack(x[c], *reinterpret_cast<const uint4*>(head + 32 * c + 8 * t));
#if HAS_NORM
    float squares = 0;
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) squares += x[c][j] * x[c][j];
    const float norm = rsqrtf(row_sum(squares) / DIM + eps);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float weight[8];
        unpack(weight, by.weights[c]);
#pragma unroll
        for (int j = 0; j < 8; j++) x[c][j] *= norm * weight[j];
    }
#endif
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float low = x[c][j], high = x[c + 2][j];
            x[c][j] = low * by.cosines[c][j] - high * by.sines[c][j];
            x[c + 2][j] = high * by.cosines[c][j] + low * by.sines[c][j];
        }
    float score = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        q[c] = pack(x[c]);
        if (owns && g == GROUP) *reinterpret_cast<uint4*>(new_key + 32 * c + 8 * t) = q[c];
        const u32 words[4] = {q[c].x, q[c].y, q[c].z, q[c].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 pair = __shfl_sync(~0u, words[i], GROUP * 4 + t);
            score += widen(u16(words[i])) * widen(u16(pair)) + widen(u16(words[i] >> 16)) * widen(u16(pair >> 16));
        }
        if (g >= GROUP) q[c] = make_uint4(0, 0, 0, 0);
    }
    score = row_sum(score) * to_log2;

    Softmax softmax = {owns ? score : LOWEST, owns && t == 0 ? 1.0f : 0.0f, {}};
    if (owns) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int dim = 64 * h + 16 * t + 8 * n;
                const uint4 raw = *reinterpret_cast<const uint4*>(value + dim);
                float wide[8];
                unpack(wide, raw);
                if (g == 0) *reinterpret_cast<uint4*>(new_value + dim) = raw;
#pragma unroll
                for (int j = 0; j < 8; j++) softmax.sum[h][j][n] = wide[j];
            }
    }
    return softmax;
}

// Adds a warp's 16 tokens that `copy_tokens` brought to `at`, `count` of which are tokens.
__device__ __forceinline__ void add_tokens(Softmax& softmax, const uint4 (&q)[4], u32 at, int count, float to_log2) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float scores[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
            // Rows are as long as all banks twice: every second one reads its two pieces the other way round.
            const u32 from = at + (g + 8 * i) * KEY_BYTES + 64 * c + 16 * t;
            const uint4 one = load_slot(from + 64 * (g % 2)), other = load_slot(from + 64 - 64 * (g % 2));
            const uint4 key = g % 2 ? other : one, next = g % 2 ? one : other;
            multiply(scores[i], q[c].x, q[c].y, key.x, key.y);
            multiply(scores[i], q[c].z, q[c].w, key.z, key.w);
            multiply(scores[i], q[c + 1].x, q[c + 1].y, next.x, next.y);
            multiply(scores[i], q[c + 1].z, q[c + 1].w, next.z, next.w);
        }
    uint4 values[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = 2 * t + i % 2 + i / 2 * 8;
            values[i][h] = load_slot(at + 16 * KEY_BYTES + token * VALUE_BYTES + 128 * h + 16 * g);
            // Never what lies where there is no token, as 0 * NaN would be NaN.
            if (token >= count) values[i][h] = make_uint4(0, 0, 0, 0);
        }
    float higher = softmax.top;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            scores[i][j] = 8 * i + 2 * t + j < count ? scores[i][j] * to_log2 : LOWEST;
            higher = fmaxf(higher, scores[i][j]);
        }
    higher = row_max(higher);
    const float rescale = power_of_two(softmax.top - higher);
    softmax.top = higher;
    softmax.total *= rescale;
    u32 p[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float low = power_of_two(scores[i][0] - higher), high = power_of_two(scores[i][1] - higher);
        softmax.total += low + high;
        p[i] = narrow(low, high);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 words[4][4] = {
            {values[0][h].x, values[0][h].y, values[0][h].z, values[0][h].w},
            {values[1][h].x, values[1][h].y, values[1][h].z, values[1][h].w},
            {values[2][h].x, values[2][h].y, values[2][h].z, values[2][h].w},
            {values[3][h].x, values[3][h].y, values[3][h].z, values[3][h].w}};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int half = j % 2 ? 0x7632 : 0x5410;
            softmax.sum[h][j][0] *= rescale;
            softmax.sum[h][j][1] *= rescale;
            multiply(softmax.sum[h][j], p[0], p[1], __byte_perm(words[0][j / 2], words[1][j / 2], half),
                     __byte_perm(words[2][j / 2], words[3][j / 2], half));
        }
    }
}

// Leaves a warp's softmax in its place of `parts` [WARPS][GROUP][MERGED].
__device__ __forceinline__ void store_softmax(float* parts, Softmax& softmax) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    softmax.total = row_sum(softmax.total);
    if (g >= GROUP) return;
    float* part = parts + (warp * GROUP + g) * MERGED;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 8; j++) part[64 * h + 16 * t + 8 * n + j] = softmax.sum[h][j][n];
    if (t == 0) {
        part[DIM] = softmax.top;
        part[DIM + 1] = softmax.total;
    }
}

// Stores to the shared memory of the first CTA of the cluster.
__device__ __forceinline__ void store_first(float* mine, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote_address(mine, 0)), "f"(v) : "memory");
}

// One dimension of `count` softmaxes `[count][GROUP][MERGED]` of a head as one: its sum, largest score and total.
__device__ __forceinline__ float3 merge(const float* parts, int count, int dim) {
    float top = LOWEST;
    for (int i = 0; i < count; i++) top = fmaxf(top, parts[i * GROUP * MERGED + DIM]);
    float3 merged = {0, top, 0};
    for (int i = 0; i < count; i++) {
        const float* part = parts + i * GROUP * MERGED;
        const float weight = power_of_two(part[DIM] - top);
        merged.x += weight * part[dim];
        merged.z += weight * part[DIM + 1];
    }
    return merged;
}

// Merges `count` softmaxes of each head and stores the outputs `[GROUP, DIM]`.
__device__ __forceinline__ void store_merged(u16* to, const float* parts, int count) {
    for (int pair = threadIdx.x; pair < GROUP * DIM / 2; pair += THREADS) {
        const float* part = parts + pair / (DIM / 2) * MERGED;
        const float3 low = merge(part, count, pair % (DIM / 2) * 2), high = merge(part, count, pair % (DIM / 2) * 2 + 1);
        *reinterpret_cast<u32*>(to + 2 * pair) = narrow(low.x / low.z, high.x / high.z);
    }
}

// Merges the warps' softmaxes into `span` [GROUP][MERGED] of the first CTA of the cluster.
__device__ __forceinline__ void send_merged(float* span, const float* parts) {
    for (int item = threadIdx.x; item < GROUP * DIM; item += THREADS) {
        const float3 merged = merge(parts + item / DIM * MERGED, WARPS, item % DIM);
        float* mine = span + item / DIM * MERGED;
        store_first(mine + item % DIM, merged.x);
        if (item % DIM == 0) {
            store_first(mine + DIM, merged.y);
            store_first(mine + DIM + 1, merged.z);
        }
    }
}
