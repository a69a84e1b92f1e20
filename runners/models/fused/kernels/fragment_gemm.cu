// GEMM of few rows with a wide weight, by warps that stream the weight as tensor-core fragments.
//
// The weight is the tall operand of mma.m16n8k16. A thread copies to shared memory, 16 bytes at a time, just
// what it will feed to the tensor core itself, so the copies of a warp need no barrier and run STAGES turns
// ahead, the first ones ahead of the wait for the kernel before. The inner dimension is permuted to make that
// possible: within 32 inputs thread t of a row's four takes the 8 from 8t on, of the weight and of x alike. The
// rows of x stay in registers, a warp's share of the inputs for all of its tiles. Partial sums are added over
// warps in shared memory, over the CTAs of a cluster, which split the inner dimension, in that of the one that
// finishes the row, always in the same order.
//
// Compiled by NVRTC with, by -D: ELEMENT (0 bf16, 1 fp16), ROWS (multiple of 8), WARPS, TURNS (64 inputs each,
// of a warp), TILES (of 16 weight rows, of a CTA), SPLITS (CTAs of a cluster), STAGES,
// PART_TILES (tiles behind one sum of squares), MIN_CTAS, and 0 or 1 each: SCALED, RESIDUAL, SILU, BIAS, PDL.
// The inner dimension is SPLITS * WARPS * TURNS * 64; the grid num_tiles / TILES * SPLITS CTAs.

#include "fragments.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int NUM_N = ROWS / 8;
constexpr int STRIDE = 20;  // Floats between rows of partial sums: 16 and 4 to keep the banks apart.
constexpr int PARTS = TILES / PART_TILES;
constexpr int WARP_ROWS = (ROWS + WARPS - 1) / WARPS;  // Whose scale a warp works out.
constexpr int CTA_INPUTS = WARPS * TURNS * 64;
constexpr int CTA_ROWS = (ROWS + SPLITS - 1) / SPLITS;  // That it finishes.
constexpr int ITEMS = CTA_ROWS * PARTS, TURN_ITEMS = THREADS / 8;
constexpr int OUTPUTS = SILU ? 8 : 16;  // Of a tile: with SILU its rows are 8 of the gate and the same 8 of up.

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// This thread's copies of one turn: rows g and g + 8 of the tile, two times 32 inputs.
__device__ __forceinline__ void copy_turn(u32 slot, const u16* row, const u16* row_below) {
    copy_async(slot, row);
    copy_async(slot + 16 * THREADS, row_below);
    copy_async(slot + 32 * THREADS, row + 32);
    copy_async(slot + 48 * THREADS, row_below + 32);
}

// Stores to the shared memory of the CTA of that rank in the cluster.
__device__ __forceinline__ void store_pair(float* mine, float2 v, u32 rank) {
    if constexpr (SPLITS == 1) {
        *reinterpret_cast<float2*>(mine) = v;
    } else {
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(remote_address(mine, rank)), "f"(v.x), "f"(v.y) : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) fragment_gemm(
    const u16* x,  // [num_rows, k]
    const float* squares,  // [num_rows, num_squares]: sums of squares of parts of x's rows, with SCALED
    const u16* w,  // [n, k], or [2 * n, k] with SILU: gate rows, then up rows
    const u16* bias,  // [n], with BIAS
    const u16* residual,  // [num_rows, n], with RESIDUAL
    u16* out,  // [num_rows, n]
    float* squares_out,  // [num_rows, n / (16 * PART_TILES)], with RESIDUAL
    int num_rows, int num_squares, int n, float eps) {
    constexpr int K = SPLITS * CTA_INPUTS;
    extern __shared__ __align__(16) char shared[];
    float* partial = reinterpret_cast<float*>(shared + STAGES * 64 * THREADS);  // [2][WARPS][ROWS][STRIDE]
    // Of the rows that this CTA finishes: every so manieth of all.
    float* sums = partial + 2 * WARPS * ROWS * STRIDE;  // [SPLITS][CTA_ROWS][TILES][16]
    float* scale = sums + SPLITS * CTA_ROWS * TILES * 16;  // [ROWS]

#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x % SPLITS, first_tile = blockIdx.x / SPLITS * TILES;
    const int first_k = (split * WARPS + warp) * (TURNS * 64) + 8 * t;

    // Where the next turn to be copied lies: the turns of a tile, then those of the next tile.
    const u64 below = SILU ? u64(n) * K : u64(8) * K;
    const u16* next = w + u64(first_tile * OUTPUTS + g) * K + first_k;
    int next_turn = 0, turns_left = TILES * TURNS;
    const u32 fifo = u32(__cvta_generic_to_shared(shared)) + 16 * thread;
    auto copy_next = [&](int slot) {
        if (turns_left > 0) {
            copy_turn(fifo + slot * (64 * THREADS), next, next + below);
            turns_left--;
            next += 64;
            if (++next_turn == TURNS) {
                next_turn = 0;
                next += u64(OUTPUTS) * K - TURNS * 64;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if constexpr (SPLITS > 1) cluster_arrive();
#pragma unroll
    for (int s = 0; s < STAGES; s++) copy_next(s);

#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // What the end needs of the residual stream is asked for now.
    const int m = thread % 8 * 2;
#if RESIDUAL
    u32 before[(ITEMS + TURN_ITEMS - 1) / TURN_ITEMS][PART_TILES];
#pragma unroll
    for (int i = 0; i * TURN_ITEMS < ITEMS; i++) {
        const int item = i * TURN_ITEMS + thread / 8, row = split + SPLITS * (item % CTA_ROWS);
        const u64 from = u64(row) * n + (first_tile + item / CTA_ROWS * PART_TILES) * 16 + m;
#pragma unroll
        for (int p = 0; p < PART_TILES; p++)
            before[i][p] = item < ITEMS && row < num_rows ? *reinterpret_cast<const u32*>(residual + from + 16 * p) : 0;
    }
#endif
    uint4 b[TURNS][2][NUM_N];
#pragma unroll
    for (int i = 0; i < NUM_N; i++) {
        // A row that is none: another one's values, whose products are not stored.
        const u16* row = x + u64(min(8 * i + g, num_rows - 1)) * K + first_k;
#pragma unroll
        for (int c = 0; c < TURNS; c++)
#pragma unroll
            for (int h = 0; h < 2; h++) b[c][h][i] = *reinterpret_cast<const uint4*>(row + 64 * c + 32 * h);
    }
#if SCALED
    // All rows of a warp at once: one after the other each would wait for its sums.
    float squared[WARP_ROWS] = {};
    for (int first = lane; first < num_squares; first += 64) {
#pragma unroll
        for (int i = 0; i < 2 * WARP_ROWS; i++) {
            const int row = warp + i / 2 * WARPS, at = first + i % 2 * 32;
            if (row < num_rows && at < num_squares) squared[i / 2] += squares[row * num_squares + at];
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        for (int step = 16; step > 0; step /= 2) squared[i] += __shfl_xor_sync(~0u, squared[i], step);
        if (lane == 0 && warp + i * WARPS < ROWS) scale[warp + i * WARPS] = rsqrtf(squared[i] / K + eps);
    }
#endif

    // Nothing goes to a CTA that has not begun.
    if constexpr (SPLITS > 1) cluster_wait();
    int slot = 0;
#pragma unroll 1
    for (int tile = 0; tile < TILES; tile++) {
        float acc[NUM_N][4] = {};
#pragma unroll
        for (int c = 0; c < TURNS; c++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            const u32 at = fifo + slot * (64 * THREADS);
            uint4 a[2], a_below[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                a[h] = load_slot(at + h * (32 * THREADS));
                a_below[h] = load_slot(at + h * (32 * THREADS) + 16 * THREADS);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int i = 0; i < NUM_N; i++)
                    multiply(acc[i], a[h].x, a_below[h].x, a[h].y, a_below[h].y, b[c][h][i].x, b[c][h][i].y);
#pragma unroll
                for (int i = 0; i < NUM_N; i++)
                    multiply(acc[i], a[h].z, a_below[h].z, a[h].w, a_below[h].w, b[c][h][i].z, b[c][h][i].w);
            }
            // What was in the slot is in registers: the products above needed it.
            copy_next(slot);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        float* mine = partial + ((tile % 2) * WARPS + warp) * (ROWS * STRIDE);
#pragma unroll
        for (int i = 0; i < NUM_N; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) mine[(8 * i + 2 * t + j % 2) * STRIDE + g + 8 * (j / 2)] = acc[i][j];
        }
        __syncthreads();
        for (int pair = thread; pair < ROWS * 8; pair += THREADS) {
            const float* from = partial + (tile % 2) * (WARPS * ROWS * STRIDE) + pair / 8 * STRIDE + pair % 8 * 2;
            float2 sum = *reinterpret_cast<const float2*>(from);
#pragma unroll
            for (int i = 1; i < WARPS; i++) {
                const float2 more = *reinterpret_cast<const float2*>(from + i * (ROWS * STRIDE));
                sum.x += more.x;
                sum.y += more.y;
            }
            const int row = pair / 8;
            store_pair(sums + ((split * CTA_ROWS + row / SPLITS) * TILES + tile) * 16 + pair % 8 * 2, sum, row % SPLITS);
        }
    }
    if constexpr (SPLITS == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }

    // Each CTA of a cluster finishes its share of the rows; 8 threads a row and part, of two columns each.
#pragma unroll
    for (int i = 0; i * TURN_ITEMS < ITEMS; i++) {
        const int item = i * TURN_ITEMS + thread / 8, row = split + SPLITS * (item % CTA_ROWS), part = item / CTA_ROWS;
        const bool valid = item < ITEMS && row < num_rows && m < OUTPUTS;
        float total = 0;
        if (valid) {
#pragma unroll
            for (int p = 0; p < PART_TILES; p++) {
                const int tile = part * PART_TILES + p;
                float2 v = {}, up = {};
#pragma unroll
                for (int s = 0; s < SPLITS; s++) {
                    const float* at = sums + ((s * CTA_ROWS + item % CTA_ROWS) * TILES + tile) * 16 + m;
                    v.x += at[0];
                    v.y += at[1];
                    if (SILU) {
                        up.x += at[8];
                        up.y += at[9];
                    }
                }
                const int column = (first_tile + tile) * OUTPUTS + m;
                const u64 to = u64(row) * n + column;
#if SCALED
                v.x *= scale[row];
                v.y *= scale[row];
                up.x *= scale[row];
                up.y *= scale[row];
#endif
#if SILU
                v.x = v.x / (1 + __expf(-v.x)) * up.x;
                v.y = v.y / (1 + __expf(-v.y)) * up.y;
#endif
#if BIAS
                v.x += widen(bias[column]);
                v.y += widen(bias[column + 1]);
#endif
#if RESIDUAL
                v.x += widen(u16(before[i][p]));
                v.y += widen(u16(before[i][p] >> 16));
#endif
                const u32 pair = narrow(v.x, v.y);
                *reinterpret_cast<u32*>(out + to) = pair;
                const float low = widen(u16(pair)), high = widen(u16(pair >> 16));
                total += low * low + high * high;
            }
        }
#if RESIDUAL
        for (int step = 4; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (valid && m == 0) squares_out[row * (n / (16 * PART_TILES)) + first_tile / PART_TILES + part] = total;
#endif
    }
}
