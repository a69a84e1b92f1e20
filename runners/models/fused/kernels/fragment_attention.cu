// Decode attention over the paged cache, fused with head norms, rotary embedding and cache write, in warps that stream
// keys and values for the tensor cores (attention_warp.cuh).
//
// A CTA serves one key head of one request over one of SPLITS spans of its past, each of its warps 16 tokens of a turn.
// Copies run STAGES turns ahead, the first ones ahead of the wait for the kernel before. The softmaxes of the warps and
// then of the CTAs of a cluster, one a span, are merged in a fixed order.
//
// The new token's key and value come from registers, so that no CTA reads what another one writes.
//
// Compiled by NVRTC with, by -D, beside what the header needs: PAGE_SIZE (multiple of 16), STAGES, SPLITS (CTAs of a
// cluster), MIN_CTAS, and PDL, 0 or 1. The grid is requests * KV_HEADS * SPLITS CTAs.

#include "attention_warp.cuh"

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
    u64* barriers = reinterpret_cast<u64*>(spans + SPLITS * GROUP * MERGED);  // [WARPS][STAGES]

#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if constexpr (SPLITS > 1) cluster_arrive();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int split = blockIdx.x % SPLITS, kv_head = blockIdx.x / SPLITS % KV_HEADS, request = blockIdx.x / (SPLITS * KV_HEADS);
    // Lengths, pages and slots are inputs of the step: no kernel after the embedding writes them. Nor the cache of past tokens.
    const int position = seq_lens[request] - 1;
    const int* pages = page_table + u64(rows[request]) * table_stride;
    const int span = (position + SPLITS * TURN - 1) / (SPLITS * TURN) * TURN, begin = split * span;
    const int end = min(position, begin + span);
    const u32 fifo = u32(__cvta_generic_to_shared(shared)) + warp * WARP_BYTES;
    const u32 barrier = u32(__cvta_generic_to_shared(barriers + warp * STAGES));
    if (lane < STAGES) init_barrier(barrier + 8 * lane);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

    // A warp's pages of 32 turns, a lane each: one after the other, each would be waited for.
    int next_turn = 0, next_token = begin + warp * 16;
    auto page_of = [&](int token) { return token < end ? pages[token / PAGE_SIZE] : 0; };
    int held = page_of(next_token + lane * TURN);
    const u64 slot_at = (u64(slots[request]) * KV_HEADS + kv_head) * DIM;
    const Rotation by = load_rotation(q_norm, k_norm, cos_sin + u64(position) * DIM);
    auto copy_next = [&](int slot) {
        const u64 page = __shfl_sync(~0u, held, next_turn % 32);
        const u64 first = (page * PAGE_SIZE + next_token % PAGE_SIZE) * KV_HEADS + kv_head;
        if (next_token < end) copy_tokens(fifo + slot * STAGE_BYTES, barrier + 8 * slot, k_cache, v_cache, first, end - next_token);
        next_token += TURN;
        if (++next_turn % 32 == 0) held = page_of(next_token + lane * TURN);
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) copy_next(s);

#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const u16* heads = qkv + u64(request) * (GROUP + 2) * KV_HEADS * DIM;
    const float to_log2 = scale * 1.4426950408889634f;
    uint4 q[4];
    // The new token belongs to the first warp of the first span.
    Softmax softmax = begin_softmax(
        q, heads + kv_head * GROUP * DIM, heads + (GROUP * KV_HEADS + kv_head) * DIM, heads + ((GROUP + 1) * KV_HEADS + kv_head) * DIM,
        by, k_cache + slot_at, v_cache + slot_at, split == 0 && warp == 0, to_log2, eps);

    int slot = 0, parity = 0;
#pragma unroll 1
    for (int token = begin + warp * 16; token < end; token += TURN) {
        wait_barrier(barrier + 8 * slot, parity);
        add_tokens(softmax, q, fifo + slot * STAGE_BYTES, end - token, to_log2);
        copy_next(slot);
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }

    store_softmax(parts, softmax);
    __syncthreads();
    u16* to = out + (u64(request) * KV_HEADS + kv_head) * GROUP * DIM;
    if constexpr (SPLITS == 1) {
        store_merged(to, parts, WARPS);
    } else {
        // Nothing goes to a CTA that has not begun.
        cluster_wait();
        send_merged(spans + split * GROUP * MERGED, parts);
        cluster_arrive();
        cluster_wait();
        if (split == 0) store_merged(to, spans, SPLITS);
    }
}
