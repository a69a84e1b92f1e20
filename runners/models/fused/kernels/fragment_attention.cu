// Decode attention over the paged cache, fused with head norms, rotary embedding and cache write, in warps that
// stream keys and values as tensor-core fragments.
//
// A CTA serves one key head of one request over one of SPLITS spans of its past, a warp 16 tokens of each turn with
// a softmax of its own. The query heads are the rows of mma.m16n8k16. A thread copies to shared memory, 16 bytes at
// a time, just what it will feed to the tensor core itself, so the copies need no barrier and run STAGES turns
// ahead, the first ones ahead of the wait for the kernel before. Dimensions are permuted to make that possible: of
// the keys, within 32, thread t of a row's four takes the 8 from 8t on; of the values, within 64, each column of a
// product takes every eighth. The probabilities are in place for the second product as the first one left them.
// The softmaxes of the warps and then of the CTAs of a cluster, one a span, are merged in a fixed order.
//
// The new token's key and value come from registers, so that no CTA reads what another one writes.
//
// Compiled by NVRTC with, by -D: ELEMENT (0 bf16, 1 fp16), KV_HEADS, GROUP (query heads of a key head, at most 4),
// PAGE_SIZE (multiple of 16), WARPS, STAGES, SPLITS (CTAs of a cluster), MIN_CTAS, and 0 or 1 each: HAS_NORM, PDL.
// Heads are 128 wide; the grid is requests * KV_HEADS * SPLITS CTAs.

#include "fragments.cuh"

constexpr int DIM = 128, THREADS = WARPS * 32, TURN = WARPS * 16;
constexpr int STAGE_BYTES = 256 * THREADS;
constexpr int MERGED = DIM + 2;  // Floats of a softmax: its sum, its largest score in units of log2(e), its total.
// Stands for minus infinity, finite so that a difference of two is not NaN.
constexpr float LOWEST = -1.0e30f;

// Rows 8 to 15 of the first operand are zero: no query heads are there.
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a2, u32 b0, u32 b1) { multiply(sum, a0, 0, a2, 0, b0, b1); }

// Zeros where there is no token: never what the cache holds there, as 0 * NaN would be NaN.
__device__ __forceinline__ void copy_async(u32 to, const u16* from, bool is_token) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_token ? 16 : 0) : "memory");
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

// Stores to the shared memory of the first CTA of the cluster.
__device__ __forceinline__ void store_first(float* mine, float v) {
    u32 at = u32(__cvta_generic_to_shared(mine)), there;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(at));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) fragment_attention(
    const u16* qkv,  // [bs, (GROUP + 2) * KV_HEADS, DIM] raw: queries, keys, values
    const u16* q_norm,  // [DIM], with HAS_NORM
    const u16* k_norm,  // [DIM], with HAS_NORM
    const float* cos_sin,  // [max_positions, DIM]: cosines of the first half of the dimensions, then sines
    u16* k_cache,  // [num_pages, PAGE_SIZE, KV_HEADS, DIM]
    u16* v_cache,
    const int* page_table,  // [rows, table_stride]
    const int* rows,  // [bs]: of the page table
    const int* seq_lens,  // [bs], the new token included
    const long long* slots,  // [bs]: where the new key and value go
    u16* out,  // [bs, GROUP * KV_HEADS, DIM]
    int table_stride, float scale, float eps) {
    extern __shared__ __align__(16) char shared[];
    float* parts = reinterpret_cast<float*>(shared + STAGES * STAGE_BYTES);  // [WARPS][GROUP][MERGED]
    float* spans = parts + WARPS * GROUP * MERGED;  // [SPLITS][GROUP][MERGED], of the first CTA

#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if constexpr (SPLITS > 1) cluster_arrive();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x % SPLITS, kv_head = blockIdx.x / SPLITS % KV_HEADS, request = blockIdx.x / (SPLITS * KV_HEADS);
    // Lengths, pages and slots are inputs of the step: no kernel of the step writes them. Nor the cache of past tokens.
    const int position = seq_lens[request] - 1;
    const int* pages = page_table + u64(rows[request]) * table_stride;
    const int span = (position + SPLITS * TURN - 1) / (SPLITS * TURN) * TURN, begin = split * span;
    const int end = min(position, begin + span), turns = max(0, (end - begin + TURN - 1) / TURN);
    const u32 fifo = u32(__cvta_generic_to_shared(shared)) + 16 * thread;

    int next_token = begin + warp * 16;
    auto page_of = [&](int token) { return token < end ? pages[token / PAGE_SIZE] : 0; };
    auto copy_next = [&](int slot, int page) {
        if (next_token < end) {
            const u64 first = (u64(page) * PAGE_SIZE + next_token % PAGE_SIZE) * KV_HEADS + kv_head;
            u32 to = fifo + slot * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int token = g + 8 * i;
                const u16* from = k_cache + (first + token * KV_HEADS) * DIM + 8 * t;
#pragma unroll
                for (int c = 0; c < 4; c++, to += 16 * THREADS) copy_async(to, from + 32 * c, next_token + token < end);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = 2 * t + i % 2 + i / 2 * 8;
                const u16* from = v_cache + (first + token * KV_HEADS) * DIM + 8 * g;
#pragma unroll
                for (int h = 0; h < 2; h++, to += 16 * THREADS) copy_async(to, from + 64 * h, next_token + token < end);
            }
        }
        next_token += TURN;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) copy_next(s, page_of(next_token));
    int page = page_of(next_token);
    const float* angles = cos_sin + u64(position) * DIM + 8 * t;
    const u64 slot_at = (u64(slots[request]) * KV_HEADS + kv_head) * DIM;

#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // Row g of the first product is a query head, row GROUP on the way there the new key: normed and rotated alike.
    const u16* heads = qkv + u64(request) * (GROUP + 2) * KV_HEADS * DIM;
    const int head = g < GROUP ? kv_head * GROUP + g : GROUP * KV_HEADS + kv_head;
    uint4 q[4];
    float x[4][8];
    float squares = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) unpack(x[c], *reinterpret_cast<const uint4*>(heads + head * DIM + 32 * c + 8 * t));
#if HAS_NORM
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) squares += x[c][j] * x[c][j];
    const float norm = rsqrtf(row_sum(squares) / DIM + eps);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float weight[8];
        unpack(weight, *reinterpret_cast<const uint4*>((g < GROUP ? q_norm : k_norm) + 32 * c + 8 * t));
#pragma unroll
        for (int j = 0; j < 8; j++) x[c][j] *= norm * weight[j];
    }
#endif
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float cosine = angles[32 * c + j], sine = angles[64 + 32 * c + j], low = x[c][j], high = x[c + 2][j];
            x[c][j] = low * cosine - high * sine;
            x[c + 2][j] = high * cosine + low * sine;
        }
    const bool owns = split == 0 && warp == 0;
    float score = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        q[c] = pack(x[c]);
        if (owns && g == GROUP) *reinterpret_cast<uint4*>(k_cache + slot_at + 32 * c + 8 * t) = q[c];
        const u32 words[4] = {q[c].x, q[c].y, q[c].z, q[c].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 key = __shfl_sync(~0u, words[i], GROUP * 4 + t);
            score += widen(u16(words[i])) * widen(u16(key)) + widen(u16(words[i] >> 16)) * widen(u16(key >> 16));
        }
        if (g >= GROUP) q[c] = make_uint4(0, 0, 0, 0);
    }
    const float to_log2 = scale * 1.4426950408889634f;
    score = row_sum(score) * to_log2;

    // The new token belongs to the first warp of the first span.
    float top = owns ? score : LOWEST, total = owns && t == 0 ? 1.0f : 0.0f;
    float acc[2][8][4] = {};
    if (owns) {
        const u16* value = heads + ((GROUP + 1) * KV_HEADS + kv_head) * DIM;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int dim = 64 * h + 16 * t + 8 * n;
                const uint4 raw = *reinterpret_cast<const uint4*>(value + dim);
                float wide[8];
                unpack(wide, raw);
                if (g == 0) *reinterpret_cast<uint4*>(v_cache + slot_at + dim) = raw;
#pragma unroll
                for (int j = 0; j < 8; j++) acc[h][j][n] = wide[j];
            }
    }

    int slot = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        const int first_token = begin + turn * TURN + warp * 16;
        if (first_token < end) {
            u32 at = fifo + slot * STAGE_BYTES;
            float scores[2][4] = {};
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int c = 0; c < 4; c++, at += 16 * THREADS) {
                    const uint4 key = load_slot(at);
                    multiply(scores[i], q[c].x, q[c].y, key.x, key.y);
                    multiply(scores[i], q[c].z, q[c].w, key.z, key.w);
                }
            uint4 values[4][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int h = 0; h < 2; h++, at += 16 * THREADS) values[i][h] = load_slot(at);
            float higher = top;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    scores[i][j] = first_token + 8 * i + 2 * t + j < end ? scores[i][j] * to_log2 : LOWEST;
                    higher = fmaxf(higher, scores[i][j]);
                }
            higher = row_max(higher);
            const float rescale = power_of_two(top - higher);
            top = higher;
            total *= rescale;
            u32 p[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float low = power_of_two(scores[i][0] - top), high = power_of_two(scores[i][1] - top);
                total += low + high;
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
                    acc[h][j][0] *= rescale;
                    acc[h][j][1] *= rescale;
                    multiply(acc[h][j], p[0], p[1], __byte_perm(words[0][j / 2], words[1][j / 2], half),
                             __byte_perm(words[2][j / 2], words[3][j / 2], half));
                }
            }
        }
        // What was in the slot is in registers: the products above needed it.
        copy_next(slot, page);
        page = page_of(next_token);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    total = row_sum(total);
    if (g < GROUP) {
        float* part = parts + (warp * GROUP + g) * MERGED;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 8; j++) part[64 * h + 16 * t + 8 * n + j] = acc[h][j][n];
        if (t == 0) {
            part[DIM] = top;
            part[DIM + 1] = total;
        }
    }
    __syncthreads();
    u16* to = out + (u64(request) * KV_HEADS + kv_head) * GROUP * DIM;
    if constexpr (SPLITS == 1) {
        for (int pair = thread; pair < GROUP * DIM / 2; pair += THREADS) {
            const float* part = parts + pair / (DIM / 2) * MERGED;
            const float3 low = merge(part, WARPS, pair % (DIM / 2) * 2), high = merge(part, WARPS, pair % (DIM / 2) * 2 + 1);
            *reinterpret_cast<u32*>(to + 2 * pair) = narrow(low.x / low.z, high.x / high.z);
        }
    } else {
        // Nothing goes to a CTA that has not begun.
        cluster_wait();
        for (int item = thread; item < GROUP * DIM; item += THREADS) {
            const float3 merged = merge(parts + item / DIM * MERGED, WARPS, item % DIM);
            float* mine = spans + (split * GROUP + item / DIM) * MERGED;
            store_first(mine + item % DIM, merged.x);
            if (item % DIM == 0) {
                store_first(mine + DIM, merged.y);
                store_first(mine + DIM + 1, merged.z);
            }
        }
        cluster_arrive();
        cluster_wait();
        for (int pair = thread; split == 0 && pair < GROUP * DIM / 2; pair += THREADS) {
            const float* part = spans + pair / (DIM / 2) * MERGED;
            const float3 low = merge(part, SPLITS, pair % (DIM / 2) * 2), high = merge(part, SPLITS, pair % (DIM / 2) * 2 + 1);
            *reinterpret_cast<u32*>(to + 2 * pair) = narrow(low.x / low.z, high.x / high.z);
        }
    }
}
