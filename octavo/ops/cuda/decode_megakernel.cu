// The decode megakernel: all layers of a decoder for up to eight tokens, in one launch. Read
// decode_megakernel.py first.
//
// One thread block runs on each multiprocessor, from the first layer to the last. In each block:
//
//     warp 8       is the producer warp. It copies weights into a ring of shared memory, in the
//                  order in which they are needed. It waits only for a free stage and for earlier
//                  copies, so memory stays busy while the other warps wait.
//     warps 0..7   multiply, normalise and attend. They synchronise with all other multiprocessors
//                  (grid_barrier) five times per layer, or six times if contexts are split.
//
// The phases of a layer. Each block computes its own outputs, and h is the residual stream:
//
//     qkv      W_qkv norm(h)
//     attend   apply rope, write K and V to the cache, attend: one task for each row, KV head and
//              split of the context
//     out      h += W_out a
//     up       act(W_gate norm(h)) * (W_up norm(h))
//     down     h += W_down y
//
// After the last layer the kernel also computes logits = W_head norm(h), if the size of the
// vocabulary allows it.
//
// Norms. RMSNorm is norm(h) = f h w with one factor f per row, so W (f h w) = f W (h w). The owner
// of an output of h keeps it in registers. It publishes h w and its part of the sum of squares. The
// other blocks multiply with h w and apply f to the result, so only a copy of the activations
// stands between two products.
//
// Products. A unit is eight outputs, or four gate and four up outputs. Its weights arrive as chunks
// [16][8][64]: 16 columns of 64 inputs. Tensor cores multiply 16 rows of activations, of which ROWS
// exist, with 8 outputs. Each warp takes two of the 16 columns of a chunk; the partial sums of the
// warps are added at the end of the phase. Shared memory is swizzled: the 16-byte part of a
// 128-byte line is stored at index part ^ (line % 8), as TMA writes it, so that eight lines are
// read without bank conflicts.
//
// decode_megakernel.py defines the constants: WARPS (that compute), ROWS, HIDDEN, INTER, HEADS,
// KV_HEADS, HEAD_DIM, BLOCK_SIZE (positions per KV block), BLOCKS (thread blocks), STAGES (chunks
// in the ring), SHARED (bytes of shared memory), PARTS (parts in which the activations of W_down
// are loaded: they are the largest, and take space from the ring), COPIES_IN_FLIGHT and
// COPIES_AT_BARRIER (see run_producer_warp), HEADS_PER_BLOCK (query heads per attention task), and
// the properties of the model: VOCAB (logits; 0 means that another kernel computes them), GELU,
// QK_NORM, WINDOWS, BIASES.

#include "hopper.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int GROUP_SIZE = HEADS / KV_HEADS;
constexpr int WIDTH = HEADS * HEAD_DIM;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int COLUMNS = 16;               // columns of 64 inputs in a chunk
constexpr int CHUNK = COLUMNS * 8 * 128;  // bytes of a chunk
constexpr int TILE = THREADS / 2;         // positions per attention tile
constexpr int SHORT_CONTEXT = 256;        // the longest context that is not split

__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceil_div(int all, int parts) { return (all + parts - 1) / parts; }

// The four products of a layer, and the product with the LM head.
enum Phase { TO_QKV, TO_OUT, TO_UP, TO_DOWN, PHASES, TO_HEAD = PHASES };
__device__ constexpr int units_of(int phase) {
    return (phase == TO_QKV    ? QKV
            : phase == TO_UP   ? 2 * INTER
            : phase == TO_HEAD ? VOCAB
                               : HIDDEN) /
           8;
}
__device__ constexpr int columns_of(int phase) {
    return (phase == TO_OUT ? WIDTH : phase == TO_DOWN ? INTER : HIDDEN) / 64;
}
// W_down is multiplied in two passes, split at SPLIT_COLUMN. The split is always the same, so that
// the bits of a row do not depend on the other rows of the batch.
constexpr int DOWN_COLUMNS = columns_of(TO_DOWN);
constexpr int TWO_THIRDS = ceil_div(2 * ceil_div(DOWN_COLUMNS, COLUMNS), 3) * COLUMNS;
constexpr int SPLIT_COLUMN = TWO_THIRDS < DOWN_COLUMNS ? TWO_THIRDS : DOWN_COLUMNS;
// Units whose partial sums a block holds until the epilogue: all of its units; for the LM head as
// many as for W_up.
__device__ constexpr int units_held(int phase) {
    return ceil_div(units_of(phase == TO_HEAD ? (int)TO_UP : phase), BLOCKS);
}

// Query heads per attention task for short contexts: the fewest for which there are enough blocks.
__device__ constexpr int min_heads(int n) {
    return n < HEADS_PER_BLOCK && HEADS_PER_BLOCK % (2 * n) == 0 && ROWS * HEADS / n > BLOCKS
               ? min_heads(2 * n)
               : n;
}
constexpr int MIN_HEADS = min_heads(1);  // for short contexts; otherwise HEADS_PER_BLOCK
constexpr bool MANY_TASKS =
    ROWS * HEADS / HEADS_PER_BLOCK > BLOCKS;  // a block may have several attention tasks
constexpr int ATTENTION_FLOATS =
    HEAD_DIM + HEADS_PER_BLOCK * (HEAD_DIM + 8) +
    max_of(HEADS_PER_BLOCK * TILE, WARPS * HEADS_PER_BLOCK * HEAD_DIM) + 3 * HEADS_PER_BLOCK + 4;
// Bytes of the activations and of the partial sums behind them, or of the scratch memory of
// attend().
__device__ constexpr int activation_bytes(int phase) {
    return ROWS * (phase == TO_DOWN && PARTS == 2 ? SPLIT_COLUMN : columns_of(phase)) * 128;
}
__device__ constexpr int product_bytes(int phase) {
    return activation_bytes(phase) + WARPS * units_held(phase) * ROWS * 8 * 4;
}
constexpr int PRODUCT_BYTES = max_of(max_of(product_bytes(TO_QKV), product_bytes(TO_OUT)),
                                     max_of(product_bytes(TO_UP), product_bytes(TO_DOWN)));
constexpr int SCRATCH_BYTES = ceil_div(max_of(PRODUCT_BYTES, ATTENTION_FLOATS * 4), 128) * 128;
static_assert(STAGES * CHUNK + SCRATCH_BYTES + STAGES * 16 + 16 + ROWS * WARPS * 4 + 4 <= SHARED,
              "decode_megakernel.py: shared_memory_layout()");

struct Layer {
    const float *norms[2], *q_norm, *k_norm, *angles;  // norms before attention and before the MLP
    const bf16 *biases[PHASES];
    u64 window;
};
struct Maps {  // TMA descriptors of the matrices of a layer
    Map of[PHASES];
};

struct Batch {  // the kernel's argument, filled by decode_megakernel.py
    const Layer *layers;
    const Maps *maps;
    const Map *head;
    const float *norm;
    const bf16 *embeddings;  // [ROWS, HIDDEN]
    bf16 *scaled_hidden;     // [ROWS, HIDDEN]: hidden states times the weights of the next norm
    float *squares;          // [ROWS, HIDDEN / 8]: sums of eight squares of hidden states
    bf16 *last;              // [ROWS, HIDDEN]: hidden states after the last norm
    bf16 *logits;            // [ROWS, VOCAB]
    bf16 *qkv;               // [ROWS, QKV]
    bf16 *attention_out;     // [ROWS, WIDTH]
    bf16 *mlp_inner;         // [ROWS, INTER]
    // [ROWS, HEADS / HEADS_PER_BLOCK, splits, HEADS_PER_BLOCK, HEAD_DIM + 2]: output, running
    // maximum and sum of each split
    float *split_results;
    bf16 *kv_cache;
    u64 stride_block, stride_layer, stride_kind, stride_head;  // strides of the cache in elements
    const int *block_table;
    u64 stride_table;
    const int *table_rows, *seq_lens;
    const long long *kv_indices, *positions;
    u32 *barrier_count;
    int num_layers;
    float epsilon, softmax_scale;  // softmax_scale includes log2(e)
};

// ---- warp reductions ----------------------------------------------------------------------------

__device__ __forceinline__ float round_to_bf16(float x) { return to_float(to_bf16(x)); }
__device__ __forceinline__ u32 pair(float a, float b) {
    return (u32)to_bf16(a) | (u32)to_bf16(b) << 16;
}
__device__ __forceinline__ float sum_of_warp(float x) {
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
// Reduces N values over a warp: v[0] of a lane receives sum number lane / (32 / N). Each round
// halves the values per lane.
template <int N>
__device__ __forceinline__ void sums_of_warp(float (&v)[N]) {
    int lane_mask = 16;
#pragma unroll
    for (int n = N / 2; n; n /= 2, lane_mask /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) {
            const bool is_upper = threadIdx.x & lane_mask;
            const float sent = is_upper ? v[i] : v[i + n], kept = is_upper ? v[i + n] : v[i];
            v[i] = kept + __shfl_xor_sync(~0u, sent, lane_mask);
        }
#pragma unroll
    for (; lane_mask; lane_mask /= 2) v[0] += __shfl_xor_sync(~0u, v[0], lane_mask);
}
__device__ __forceinline__ float max_of_warp(float x) {
    for (int i = 16; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// All blocks load the same data. Each block permutes its threads so that the blocks do not access
// the same lines at once.
__device__ __forceinline__ int permuted_thread(int tid) { return tid ^ blockIdx.x % WARPS * 32; }

// ---- synchronisation ----------------------------------------------------------------------------

__device__ __forceinline__ void block_barrier() { named_barrier<THREADS>(); }

// A barrier over the computing warps of all multiprocessors. What they wrote before it is in the L2
// cache, where load_l2() reads it. An `acquire` would also empty the L1 cache; it is enough that
// load_l2() is not moved before the block barrier in between. While it waits, each thread runs
// work(), which does not depend on the barrier: mostly loads.
struct GridBarrier {
    u32 *barrier_count, expected;
    volatile int *waiting;  // tells the producer warp that the block waits at the barrier

    template <class Work>
    __device__ __forceinline__ void operator()(Work work) {
        expected += BLOCKS;
        block_barrier();
        if (threadIdx.x == 0) {
            *waiting = 1;
            grid_arrive(barrier_count);
        }
        work();
        if (threadIdx.x == 0) {
            grid_wait(barrier_count, expected);
            *waiting = 0;
        }
        block_barrier();
    }
};

// ---- the ring of weights ------------------------------------------------------------------------

struct Ring {
    u32 chunks, full, empty;  // addresses in shared memory
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Iterates over all weight chunks that this multiprocessor needs, in order.
struct ChunkIterator {
    int layers, layer = 0, phase = 0, unit = blockIdx.x, begin = 0,
                column = 0;  // begin: first column of this pass

    __device__ __forceinline__ int row() const { return unit * (phase == TO_UP ? 4 : 8); }
    __device__ __forceinline__ bool has_second_pass() const {
        return phase == TO_DOWN && begin == 0 && SPLIT_COLUMN < DOWN_COLUMNS;
    }  // W_down has a second pass
    __device__ __forceinline__ void next() {
        column += COLUMNS;
        if (column < (has_second_pass() ? SPLIT_COLUMN : columns_of(phase))) return;
        column = begin;
        unit += BLOCKS;
        skip_empty_units();
    }
    __device__ __forceinline__ void
    skip_empty_units() {  // a small product leaves some blocks without a unit
        while (!done() && unit >= units_of(phase)) {
            unit = blockIdx.x;
            column = begin = has_second_pass() ? SPLIT_COLUMN : 0;
            if (begin == 0 && ++phase >= PHASES) {
                layer++;
                phase = layer == layers ? (int)TO_HEAD : 0;
            }
        }
    }
    __device__ __forceinline__ bool done() const { return layer == layers + (VOCAB > 0); }
};

// The producer warp: keeps the ring full. At most COPIES_IN_FLIGHT copies are in flight: more would
// not arrive sooner, and the loads of the other warps would queue behind them. While the block
// waits at a grid barrier the limit is COPIES_AT_BARRIER.
__device__ __forceinline__ void run_producer_warp(Ring ring, const Maps *maps, const Map *head,
                                                  int layers, volatile int *at_barrier) {
    ChunkIterator chunk_iterator{layers};
    chunk_iterator.skip_empty_units();
    if (VOCAB) prefetch_map(head);
    for (int i = 0; !chunk_iterator.done(); i++, chunk_iterator.next(), ring.next()) {
        if (i == 0 || (chunk_iterator.phase == TO_OUT && chunk_iterator.column == 0))
            for (int j = 0; j < PHASES; j++)
                prefetch_map(&maps[min(chunk_iterator.layer + 1, layers - 1)].of[j]);
        const u32 full = ring.full + ring.stage * 8;
        const int copies = COPIES_IN_FLIGHT > COPIES_AT_BARRIER && *at_barrier ? COPIES_AT_BARRIER
                                                                               : COPIES_IN_FLIGHT,
                  earlier = ring.stage - copies;
        mbarrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
        if (i >= copies)
            mbarrier_wait(ring.full + (earlier < 0 ? earlier + STAGES : earlier) * 8,
                          earlier < 0 ? ring.parity ^ 1 : ring.parity);
        mbarrier_expect<CHUNK>(full);
        const Map *map = chunk_iterator.phase == TO_HEAD
                             ? head
                             : &maps[chunk_iterator.layer].of[chunk_iterator.phase];
        copy(ring.chunks + ring.stage * CHUNK, map, chunk_iterator.row(), chunk_iterator.column, full);
    }
}

// Norm weights and layer descriptors are small, but each access would stall. All of them are
// prefetched into L2 at the start.
__device__ __forceinline__ void prefetch_small(const Batch &batch) {
    for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < batch.num_layers; i += BLOCKS * WARPS)
        for (int at = threadIdx.x % 32; at < HIDDEN / 32; at += 32) {
            prefetch_l2(batch.layers[i].norms[0] + at * 32);
            prefetch_l2(batch.layers[i].norms[1] + at * 32);
            if (at < sizeof(Maps) / 128) prefetch_l2((const char *)(batch.maps + i) + at * 128);
        }
}

// Multiplies columns BEGIN .. END - 1 of the activations in shared memory with units first_unit ..
// end - 1. Each block has every BLOCKS-th unit, at most `held`. The partial sums of each warp go to
// `sums` [WARPS, held, ROWS, 8]; a second pass adds to them.
template <int BEGIN, int END>
__device__ __forceinline__ void product(Ring &ring, int first_unit, int end, int held,
                                        u32 activations, u32 zeros, float *sums) {
    const int tid = thread();
    constexpr int PIECES = COLUMNS / WARPS * 2;  // pieces of 32 inputs per warp and chunk
    const int warp = tid / 32, lane = tid % 32, line = lane % 8, part = lane / 8;
    float *target = sums + (warp * held * ROWS + lane / 4) * 8 + lane % 4 * 2;
#pragma unroll 1
    for (int unit = first_unit + blockIdx.x; unit < end; unit += BLOCKS, target += ROWS * 8) {
        float accumulators[4][4] = {};
#pragma unroll 1
        for (int first = 0; first < END - BEGIN; first += COLUMNS) {
            const u32 chunk = ring.chunks + ring.stage * CHUNK + line * 128;
            u32 activation_tiles[PIECES][4], weight_tiles[PIECES][4];
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                const int column = min(first + j / 2 * WARPS + warp,
                                       END - BEGIN - 1);  // beyond the end the weights are zero
                ldmatrix_x4(activation_tiles[j], line < ROWS
                                                     ? activations + (column * ROWS + line) * 128 +
                                                           ((j % 2 * 4 + part) ^ line) * 16
                                                     : zeros);
            }
            mbarrier_wait(ring.full + ring.stage * 8, ring.parity);
#pragma unroll
            for (int j = 0; j < PIECES; j++)
                ldmatrix_x4(weight_tiles[j], chunk + (j / 2 * WARPS + warp) * 1024 +
                                                 ((j % 2 * 4 + part) ^ line) * 16);
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                multiply(accumulators[j % 2 * 2], activation_tiles[j][0], activation_tiles[j][1],
                         weight_tiles[j][0], weight_tiles[j][1]);
                multiply(accumulators[j % 2 * 2 + 1], activation_tiles[j][2],
                         activation_tiles[j][3], weight_tiles[j][2], weight_tiles[j][3]);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.empty + ring.stage * 8);
            ring.next();
        }
        if (lane / 4 >= ROWS) continue;
        float2 sum = make_float2(
            accumulators[0][0] + accumulators[1][0] + accumulators[2][0] + accumulators[3][0],
            accumulators[0][1] + accumulators[1][1] + accumulators[2][1] + accumulators[3][1]);
        if (BEGIN) {
            sum.x += target[0];
            sum.y += target[1];
        }
        *(float2 *)target = sum;
    }
}

// Adds the partial sums of all warps.
__device__ __forceinline__ float sum_over_warps(const float *sums, int stride) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += sums[w * stride];
    return value;
}

// ---- the residual stream and its norms ----------------------------------------------------------

// The slice of the residual stream h that a thread owns: the same outputs for W_out and for W_down.
struct ResidualSlice {
    static constexpr int ELEMENTS = units_held(TO_OUT) * ROWS * 8,
                         PER_THREAD = ceil_div(ELEMENTS, THREADS);
    float hidden[PER_THREAD], norm_weights[PER_THREAD];  // norm_weights: of the next norm

    template <class Work>
    static __device__ __forceinline__ void for_each(
        Work work) {  // work(j, index among the sums, exists, unit, row, output)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const int i = thread() + j * THREADS, unit = blockIdx.x + i / 8 / ROWS * BLOCKS;
            work(j, i, i < ELEMENTS && unit < units_of(TO_OUT), unit, i / 8 % ROWS,
                 unit * 8 + i % 8);
        }
    }
    __device__ __forceinline__ void begin(const bf16 *embeddings) {
        for_each([&](int j, int, bool exists, int, int row, int output) {
            hidden[j] = exists ? to_float(embeddings[row * HIDDEN + output]) : 0;
        });
    }
    __device__ __forceinline__ void norm(const float *weight) {
        for_each([&](int j, int, bool exists, int, int, int output) {
            norm_weights[j] = exists ? weight[output] : 0;
        });
    }
    __device__ __forceinline__ void add(const float *sums, const bf16 *bias) {
        for_each([&](int j, int place, bool exists, int, int, int output) {
            if (!exists) return;
            float value = sum_over_warps(sums + place, ELEMENTS);
            if (BIASES && bias) value += to_float(bias[output]);
            hidden[j] = round_to_bf16(hidden[j] + value);
        });
    }
    __device__ __forceinline__ void publish(const Batch &batch) const {
        for_each([&](int j, int, bool exists, int unit, int row, int output) {
            float square = hidden[j] * hidden[j];
            for (int i = 4; i; i /= 2) square += __shfl_xor_sync(~0u, square, i);
            if (!exists) return;
            batch.scaled_hidden[row * HIDDEN + output] = to_bf16(hidden[j] * norm_weights[j]);
            if (output % 8 == 0) batch.squares[row * (HIDDEN / 8) + unit] = square;
        });
    }
};

// The RMSNorm factor f of each row. Each thread loads a part of the squares, which are reduced
// during the product.
struct RmsFactors {
    static constexpr int N = ROWS > 4   ? 8
                             : ROWS > 2 ? 4
                                        : ROWS,
                         UNITS = HIDDEN / 8, PER_THREAD = ceil_div(UNITS, THREADS);
    float part[PER_THREAD][ROWS];

    __device__ __forceinline__ void load(const float *squares) {
        const int tid = permuted_thread(thread());
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const int i = tid + j * THREADS;
                part[j][row] = i < UNITS ? load_l2_float(squares + row * UNITS + i) : 0;
            }
    }
    __device__ __forceinline__ void reduce(float *partial_sums) const {  // [ROWS, WARPS]
        const int tid = permuted_thread(thread());
        float sums[N] = {};
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++) sums[row] += part[j][row];
        sums_of_warp(sums);
        if (tid % (32 / N) == 0 && tid % 32 / (32 / N) < ROWS)
            partial_sums[tid % 32 / (32 / N) * WARPS + tid / 32] = sums[0];
    }
    static __device__ __forceinline__ float of(const float *partial_sums, int row, float eps) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w += 4) {
            const float4 four = *(const float4 *)(partial_sums + row * WARPS + w);
            all += four.x + four.y + four.z + four.w;
        }
        return rsqrtf(all / HIDDEN + eps);
    }
};

// The epilogue of a product with h w, from unit `first` on: applies f, the bias and the activation,
// and stores the result.
template <int PHASE>
__device__ __forceinline__ void epilogue(const Batch &batch, const Layer *layer, int first, int end,
                                         const float *sums, const float *partial_sums) {
    const int tid = thread();
    constexpr int WIDE = PHASE == TO_UP ? 4 : 8, STRIDE = units_held(PHASE) * ROWS * 8;
    const bf16 *bias = BIASES && PHASE != TO_HEAD ? layer->biases[PHASE] : nullptr;
    for (int i = tid; i < units_held(PHASE) * ROWS * WIDE; i += THREADS) {
        const int place = i / WIDE, unit = first + blockIdx.x + place / ROWS * BLOCKS,
                  row = place % ROWS, output = unit * WIDE + i % WIDE;
        if (unit >= end) continue;
        const float *at = sums + place * 8 + i % WIDE,
                    f = RmsFactors::of(partial_sums, row, batch.epsilon);
        float value = sum_over_warps(at, STRIDE) * f;
        if (BIASES && bias) value += to_float(bias[output]);
        if (PHASE == TO_UP) {
            float up = sum_over_warps(at + 4, STRIDE) * f;
            if (BIASES && bias) up += to_float(bias[INTER + output]);
            value = round_to_bf16(value);
            up = round_to_bf16(up);
            const float z =
                GELU ? 1.5957691216057308f * (value + 0.044715f * value * value * value) : value;
            value = value / (1 + exp2_(-1.4426950408889634f * z)) * up;
        }
        bf16 *to = PHASE == TO_QKV  ? batch.qkv + row * QKV
                   : PHASE == TO_UP ? batch.mlp_inner + row * INTER
                                    : batch.logits + (u64)row * VOCAB;
        to[output] = to_bf16(value);
    }
}

// ---- activations, into shared memory ------------------------------------------------------------

__device__ __forceinline__ char *swizzled(
    char *activations, int row, int octet) {  // swizzled address of eight neighbouring inputs
    return activations + (octet / 8 * ROWS + row) * 128 + ((octet % 8) ^ (row % 8)) * 16;
}

// Loads columns BEGIN .. END - 1 of the ALL columns of the activations.
template <int ALL, int BEGIN, int END>
__device__ __forceinline__ void load_activations(char *activations, const bf16 *source) {
    const int tid = permuted_thread(thread());
#pragma unroll 2
    for (int i = tid; i < (END - BEGIN) * 8; i += THREADS) {
        uint4 values[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            values[row] = load_l2(source + row * ALL * 64 + BEGIN * 64 + i * 8);
#pragma unroll
        for (int row = 0; row < ROWS; row++) *(uint4 *)swizzled(activations, row, i) = values[row];
    }
    block_barrier();
}

// load_activations() in two steps: the data is loaded into registers during another product and
// stored to shared memory afterwards.
template <int ALL, int BEGIN, int END>
struct DeferredLoad {
    static constexpr int N = ceil_div((END - BEGIN) * 8, THREADS);
    uint4 values[N][ROWS];

    __device__ __forceinline__ void load(const bf16 *source) {
        const int tid = permuted_thread(thread());
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const int i = min(tid + j * THREADS, (END - BEGIN) * 8 - 1);
                values[j][row] = load_l2(source + row * ALL * 64 + BEGIN * 64 + i * 8);
            }
    }
    __device__ __forceinline__ void store(char *activations) const {
        const int tid = permuted_thread(thread());
        block_barrier();  // the previous contents are no longer needed
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                if (tid + j * THREADS < (END - BEGIN) * 8)
                    *(uint4 *)swizzled(activations, row, tid + j * THREADS) = values[j][row];
        block_barrier();
    }
};

// ---- attention ----------------------------------------------------------------------------------

// An attention task of a block: some query heads of a row that share a KV head, over positions
// begin .. end - 1.
struct AttentionTask {
    int row, head, begin, end;  // head: first query head
    bool newest;                // the last position is the token of this step
    const int *table;
    u64 new_key;                                   // the offset of the new key in the cache
    int key_block, value_block;                    // KV blocks of the first tile
    float cos[HEAD_DIM / 64], sin[HEAD_DIM / 64];  // for dimension lane + 32 i

    __device__ __forceinline__ AttentionTask(const Batch &batch, const Layer &layer, int i,
                                             int heads, int splits) {
        row = i / (HEADS / heads * splits);
        head = i / splits * heads % HEADS;
        const int length = batch.seq_lens[row],
                  first = layer.window ? max(0, length - (int)layer.window) : 0;
        const int part = ceil_div(length - first, splits);
        begin = min(first + i % splits * part, length);
        end = min(begin + part, length);
        newest = begin < end && end == length;
        table = batch.block_table + batch.table_rows[row] * batch.stride_table;
        new_key = batch.kv_indices[row] / BLOCK_SIZE * batch.stride_block +
                  batch.kv_indices[row] % BLOCK_SIZE * HEAD_DIM;
        lookup_blocks(begin);
        const float *angles = layer.angles + batch.positions[row] * HEAD_DIM + threadIdx.x % 32;
        for (int j = 0; j < HEAD_DIM / 64; j++) {
            cos[j] = angles[32 * j];
            sin[j] = angles[HEAD_DIM / 2 + 32 * j];
        }
    }
    __device__ __forceinline__ void lookup_blocks(int first) {
        const int tid = thread();
        const int key = first + tid / 2, value = first + tid / 32 * 16 + tid % 16;
        key_block = key < end ? table[key / BLOCK_SIZE] : 0;
        value_block = value < end ? table[value / BLOCK_SIZE] : 0;
    }
};

// Keys and values of a tile in registers. Two threads share the key of a position. A warp holds the
// values of 16 positions, AT_ONCE at a time; a lane holds eight dimensions.
struct KvTile {
    static constexpr int LANES = HEAD_DIM / 8, AT_ONCE = 32 / LANES;
    uint4 k[HEAD_DIM / 16], v[16 / AT_ONCE];

    __device__ __forceinline__ void load(const Batch &batch, const bf16 *kv,
                                         const AttentionTask &task, int first) {
        const int tid = thread();
        const int p = first + tid / 2;
        const bf16 *key = kv + task.key_block * batch.stride_block + p % BLOCK_SIZE * HEAD_DIM +
                          tid % 2 * (HEAD_DIM / 2);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++)
            k[i] = p < task.end ? *(const uint4 *)(key + i * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; i++) {
            const u64 block = __shfl_sync(~0u, task.value_block, position(tid, i));
            const int at = first + tid / 32 * 16 + position(tid, i);
            const bf16 *value = kv + batch.stride_kind + block * batch.stride_block +
                                at % BLOCK_SIZE * HEAD_DIM + tid % LANES * 8;
            v[i] = at < task.end ? *(const uint4 *)value : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ int position(int tid, int i) {
        return i * AT_ONCE + tid % 32 / LANES;
    }  // index among the 16 positions of the warp
};

// Loads the vector of one head, applies the q or k norm if the model has one, and applies rope. A
// lane holds dimensions lane + 32 i and HEAD_DIM / 2 + lane + 32 i.
__device__ __forceinline__ void norm_and_rope(const bf16 *from, const float *norm,
                                              const AttentionTask &task, float eps,
                                              float (&a)[HEAD_DIM / 64],
                                              float (&b)[HEAD_DIM / 64]) {
    const int tid = thread();
    const int lane = tid % 32;
    float squares = 0;
    for (int i = 0; i < HEAD_DIM / 64; i++) {
        a[i] = load_l2_bf16(from + lane + 32 * i);
        b[i] = load_l2_bf16(from + HEAD_DIM / 2 + lane + 32 * i);
        squares += a[i] * a[i] + b[i] * b[i];
    }
    if (QK_NORM) {
        const float factor = rsqrtf(sum_of_warp(squares) / HEAD_DIM + eps);
        for (int i = 0; i < HEAD_DIM / 64; i++) {
            a[i] = round_to_bf16(a[i] * factor * norm[lane + 32 * i]);
            b[i] = round_to_bf16(b[i] * factor * norm[HEAD_DIM / 2 + lane + 32 * i]);
        }
    }
    for (int i = 0; i < HEAD_DIM / 64; i++) {
        const float x = a[i], y = b[i];
        a[i] = x * task.cos[i] - y * task.sin[i];
        b[i] = y * task.cos[i] + x * task.sin[i];
    }
}

// `tile`, if loaded, is the first tile of the task, loaded before the key and value of this step
// existed. They are inserted here and written to the cache.
template <int NUM_QUERIES>  // number of query heads
__device__ __forceinline__ void attend(const Batch &batch, const Layer &layer, bf16 *kv,
                                       AttentionTask &task, KvTile &tile, bool loaded, float *part,
                                       bool partial, float *scratch) {
    const int tid = thread();
    constexpr int HALF = HEAD_DIM / 2 + 4;  // stride of half a query, padded so that two threads
                                            // read both halves without bank conflicts
    bf16 *new_key = (bf16 *)scratch, *new_value = new_key + HEAD_DIM;
    float *queries = scratch + HEAD_DIM, *running_max = queries + NUM_QUERIES * 2 * HALF,
          *sum = running_max + NUM_QUERIES, *rescale = sum + NUM_QUERIES,
          *score = running_max + ceil_div(3 * NUM_QUERIES, 4) * 4;
    float *warp_sums = score;  // reuses the memory of the scores
    const int warp = tid / 32, lane = tid % 32, half = tid % 2;
    const bf16 *token_qkv = batch.qkv + task.row * QKV;
    const int key_head = task.head / GROUP_SIZE;
    const bool writes = task.newest && task.head % GROUP_SIZE == 0;
    bf16 *target = kv + task.new_key;
    for (int i = warp; i < NUM_QUERIES + 2; i += WARPS) {
        if (i > NUM_QUERIES) {
            for (int d = lane; d < HEAD_DIM; d += 32) {
                const bf16 v =
                    to_bf16(load_l2_bf16(token_qkv + (HEADS + KV_HEADS + key_head) * HEAD_DIM + d));
                new_value[d] = v;
                if (writes) target[batch.stride_kind + d] = v;
            }
            continue;
        }
        float a[HEAD_DIM / 64], b[HEAD_DIM / 64];
        norm_and_rope(token_qkv + (i < NUM_QUERIES ? task.head + i : HEADS + key_head) * HEAD_DIM,
                      i < NUM_QUERIES ? layer.q_norm : layer.k_norm, task, batch.epsilon, a, b);
        for (int j = 0; j < HEAD_DIM / 64; j++) {
            const int d = lane + 32 * j;
            if (i < NUM_QUERIES) {
                queries[i * 2 * HALF + d] = round_to_bf16(a[j]);
                queries[(i * 2 + 1) * HALF + d] = round_to_bf16(b[j]);
            } else {
                new_key[d] = to_bf16(a[j]);
                new_key[HEAD_DIM / 2 + d] = to_bf16(b[j]);
                if (writes) {
                    target[d] = new_key[d];
                    target[HEAD_DIM / 2 + d] = new_key[HEAD_DIM / 2 + d];
                }
            }
        }
    }
    if (tid < NUM_QUERIES) {
        running_max[tid] = -INFINITY;
        sum[tid] = 0;
    }
    float accumulators[NUM_QUERIES][8];
#pragma unroll
    for (int query = 0; query < NUM_QUERIES; query++)
#pragma unroll
        for (int j = 0; j < 8; j++) accumulators[query][j] = 0;
    block_barrier();
#pragma unroll 1
    for (int first = task.begin; first < task.end; first += TILE) {
        const int p = first + tid / 2, last = task.newest ? task.end - 1 : -1;
        if (!loaded || first > task.begin) {
            task.lookup_blocks(first);
            tile.load(batch, kv, task, first);
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++)
            if (p == last) tile.k[i] = ((const uint4 *)new_key)[half * (HEAD_DIM / 16) + i];
#pragma unroll
        for (int i = 0; i < 16 / KvTile::AT_ONCE; i++)
            if (first + warp * 16 + KvTile::position(tid, i) == last)
                tile.v[i] = ((const uint4 *)new_value)[lane % KvTile::LANES];
        float scores[NUM_QUERIES];
#pragma unroll
        for (int query = 0; query < NUM_QUERIES; query++) scores[query] = 0;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            const uint4 k = tile.k[i];
            const float elements[8] = {low(k.x), high(k.x), low(k.y), high(k.y),
                                       low(k.z), high(k.z), low(k.w), high(k.w)};
#pragma unroll
            for (int query = 0; query < NUM_QUERIES; query++) {
                const float4 *from = (const float4 *)(queries + (query * 2 + half) * HALF + i * 8);
                const float4 x = from[0], y = from[1];
                scores[query] += elements[0] * x.x + elements[1] * x.y + elements[2] * x.z +
                                 elements[3] * x.w + elements[4] * y.x + elements[5] * y.y +
                                 elements[6] * y.z + elements[7] * y.w;
            }
        }
#pragma unroll
        for (int query = 0; query < NUM_QUERIES; query++) {
            scores[query] += __shfl_xor_sync(~0u, scores[query], 1);
            if (half == 0)
                score[query * TILE + tid / 2] =
                    p < task.end ? scores[query] * batch.softmax_scale : -INFINITY;
        }
        block_barrier();
        for (int query = warp; query < NUM_QUERIES; query += WARPS) {
            float *row = score + query * TILE, x[TILE / 32], old_max = running_max[query],
                  new_max = old_max, total = 0;
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) {
                x[i] = row[lane + 32 * i];
                new_max = fmaxf(new_max, x[i]);
            }
            new_max = max_of_warp(new_max);
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) total += row[lane + 32 * i] = exp2_(x[i] - new_max);
            total = sum_of_warp(total);
            if (lane == 0) {
                rescale[query] = exp2_(old_max - new_max);
                sum[query] = sum[query] * exp2_(old_max - new_max) + total;
                running_max[query] = new_max;
            }
        }
        block_barrier();
#pragma unroll
        for (int query = 0; query < NUM_QUERIES; query++)
#pragma unroll
            for (int j = 0; j < 8; j++) accumulators[query][j] *= rescale[query];
#pragma unroll
        for (int i = 0; i < 16 / KvTile::AT_ONCE; i++) {
            const uint4 v = tile.v[i];
            const float elements[8] = {low(v.x), high(v.x), low(v.y), high(v.y),
                                       low(v.z), high(v.z), low(v.w), high(v.w)};
#pragma unroll
            for (int query = 0; query < NUM_QUERIES; query++) {
                const float weight = score[query * TILE + warp * 16 + KvTile::position(tid, i)];
#pragma unroll
                for (int j = 0; j < 8; j++) accumulators[query][j] += weight * elements[j];
            }
        }
        block_barrier();
    }
#pragma unroll
    for (int query = 0; query < NUM_QUERIES; query++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = KvTile::LANES; i < 32; i *= 2)
                accumulators[query][j] += __shfl_xor_sync(~0u, accumulators[query][j], i);
        if (lane < KvTile::LANES) {
            float4 *target =
                (float4 *)(warp_sums + (warp * NUM_QUERIES + query) * HEAD_DIM + lane * 8);
            target[0] = make_float4(accumulators[query][0], accumulators[query][1],
                                    accumulators[query][2], accumulators[query][3]);
            target[1] = make_float4(accumulators[query][4], accumulators[query][5],
                                    accumulators[query][6], accumulators[query][7]);
        }
    }
    block_barrier();
    for (int i = tid; i < NUM_QUERIES * HEAD_DIM; i += THREADS) {
        float value = 0;
        for (int w = 0; w < WARPS; w++) value += warp_sums[w * NUM_QUERIES * HEAD_DIM + i];
        if (partial)
            part[i / HEAD_DIM * (HEAD_DIM + 2) + i % HEAD_DIM] = value;
        else
            batch.attention_out[task.row * WIDTH + task.head * HEAD_DIM + i] =
                to_bf16(value / sum[i / HEAD_DIM]);
    }
    if (partial && tid < NUM_QUERIES) {
        part[tid * (HEAD_DIM + 2) + HEAD_DIM] = running_max[tid];
        part[tid * (HEAD_DIM + 2) + HEAD_DIM + 1] = sum[tid];
    }
}

// Merges the splits of each head by their running maxima; one warp per head.
__device__ __forceinline__ void merge_splits(const Batch &batch, int splits) {
    const int tid = thread();
    const int lane = tid % 32;
    for (int i = blockIdx.x * WARPS + tid / 32; i < ROWS * HEADS; i += BLOCKS * WARPS) {
        const float *results =
            batch.split_results +
            (i / HEADS_PER_BLOCK * splits * HEADS_PER_BLOCK + i % HEADS_PER_BLOCK) * (HEAD_DIM + 2);
        float new_max = -INFINITY, total = 0, accumulators[HEAD_DIM / 32];
        for (int j = 0; j < HEAD_DIM / 32; j++) accumulators[j] = 0;
        for (int split = 0; split < splits; split++)
            new_max =
                fmaxf(new_max,
                      load_l2_float(results + split * HEADS_PER_BLOCK * (HEAD_DIM + 2) + HEAD_DIM));
        for (int split = 0; split < splits; split++) {
            const float *result = results + split * HEADS_PER_BLOCK * (HEAD_DIM + 2);
            const float weight = exp2_(load_l2_float(result + HEAD_DIM) - new_max);
            total += weight * load_l2_float(result + HEAD_DIM + 1);
            for (int j = 0; j < HEAD_DIM / 32; j++)
                accumulators[j] += weight * load_l2_float(result + lane + 32 * j);
        }
        for (int j = 0; j < HEAD_DIM / 32; j++)
            batch.attention_out[i * HEAD_DIM + lane + 32 * j] = to_bf16(accumulators[j] / total);
    }
}

// ---- the kernel ---------------------------------------------------------------------------------

// A product with norm(h): qkv, gate and up, or the LM head.
template <int PHASE>
__device__ __forceinline__ void multiply_normalised(const Batch &batch, const Layer *layer,
                                                    Ring &ring, char *activations, u32 zeros,
                                                    float *partial_sums) {
    constexpr int ROUND_UNITS = units_held(PHASE) * BLOCKS;  // units of all blocks per round
    float *sums = (float *)(activations + activation_bytes(PHASE));
    RmsFactors rms_factors;
    load_activations<HIDDEN / 64, 0, HIDDEN / 64>(activations, batch.scaled_hidden);
    rms_factors.load(batch.squares);  // loaded while the product runs
#pragma unroll 1
    for (int first = 0; first < units_of(PHASE); first += ROUND_UNITS) {
        const int end = min(first + ROUND_UNITS, units_of(PHASE));
        if (first) block_barrier();  // the previous partial sums have been read
        product<0, HIDDEN / 64>(ring, first, end, units_held(PHASE), shared(activations), zeros,
                                sums);
        if (first == 0) rms_factors.reduce(partial_sums);
        block_barrier();
        epilogue<PHASE>(batch, layer, first, end, sums, partial_sums);
    }
}

// A product that is added to h, in two passes if FIRST is less than ALL.
template <int PHASE, int FIRST, int ALL>
__device__ __forceinline__ void multiply_and_add(const Batch &batch, const Layer &layer, Ring &ring,
                                                 char *activations, u32 zeros,
                                                 ResidualSlice &residual) {
    constexpr bool IN_TWO_PARTS = FIRST < ALL && PARTS == 2;
    const bf16 *source = PHASE == TO_OUT ? batch.attention_out : batch.mlp_inner;
    float *sums = (float *)(activations + activation_bytes(PHASE));
    load_activations<ALL, 0, IN_TWO_PARTS ? FIRST : ALL>(activations, source);
    if constexpr (FIRST < ALL) {
        DeferredLoad<ALL, FIRST, ALL> second_part;
        if constexpr (IN_TWO_PARTS) second_part.load(source);
        product<0, FIRST>(ring, 0, units_of(PHASE), units_held(PHASE), shared(activations), zeros,
                          sums);
        if constexpr (IN_TWO_PARTS) second_part.store(activations);
        product<FIRST, ALL>(ring, 0, units_of(PHASE), units_held(PHASE),
                            shared(activations) + (IN_TWO_PARTS ? 0 : FIRST * ROWS * 128), zeros,
                            sums);
    } else
        product<0, ALL>(ring, 0, units_of(PHASE), units_held(PHASE), shared(activations), zeros,
                        sums);
    block_barrier();
    residual.add(sums, BIASES ? layer.biases[PHASE] : nullptr);
    residual.publish(batch);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    decode_megakernel(const __grid_constant__ Batch batch) {
    SHARED_MEMORY(memory);
    char *activations = memory + STAGES * CHUNK;
    float *scratch = (float *)activations;  // scratch memory of attend()
    u64 *barriers = (u64 *)(activations + SCRATCH_BYTES);
    uint4 *zero_line = (uint4 *)(barriers + 2 * STAGES);
    float *partial_sums = (float *)(zero_line + 1);
    volatile int *at_barrier = (int *)(partial_sums + ROWS * WARPS);
    Ring ring{shared(memory), shared(barriers), shared(barriers + STAGES)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(ring.full + i * 8, 1);
            mbarrier_init(ring.empty + i * 8, WARPS);
        }
        mbarrier_fence();
        *zero_line = make_uint4(0, 0, 0, 0), *at_barrier = 0;
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS)
            run_producer_warp(ring, batch.maps, batch.head, batch.num_layers, at_barrier);
        return;
    }
    prefetch_small(batch);
    const u32 zeros = shared(zero_line);
    GridBarrier grid_barrier{batch.barrier_count, 0, at_barrier};
    int longest = 0;
    for (int i = 0; i < ROWS; i++) longest = max(longest, batch.seq_lens[i]);
    // With short contexts, query heads that share a KV head run as separate tasks: reading the keys
    // twice is faster than waiting.
    const bool separate_heads = longest <= SHORT_CONTEXT && ROWS * HEADS / MIN_HEADS <= BLOCKS;
    const int heads = separate_heads ? MIN_HEADS : HEADS_PER_BLOCK, groups = ROWS * HEADS / heads;
    const int splits = longest <= SHORT_CONTEXT
                           ? 1
                           : max(1, min(BLOCKS / groups, ceil_div(longest, TILE))),
              num_tasks = groups * splits;
    ResidualSlice residual;
    residual.begin(batch.embeddings);
    residual.norm(batch.layers->norms[0]);
    residual.publish(batch);
    AttentionTask task(batch, *batch.layers, min((int)blockIdx.x, num_tasks - 1), heads, splits);
    KvTile tile;
    grid_barrier([] {});
#pragma unroll 1
    for (int index = 0; index < batch.num_layers; index++) {
        const Layer &layer = batch.layers[index];
        bf16 *kv = batch.kv_cache + index * batch.stride_layer;

        multiply_normalised<TO_QKV>(batch, &layer, ring, activations, zeros, partial_sums);
        grid_barrier([&] {
            if (WINDOWS)
                task =
                    AttentionTask(batch, layer, min((int)blockIdx.x, num_tasks - 1), heads, splits);
            if (blockIdx.x < num_tasks)
                tile.load(batch, kv + task.head / GROUP_SIZE * batch.stride_head, task, task.begin);
        });

        for (int i = blockIdx.x; i < num_tasks; i += BLOCKS) {
            if (MANY_TASKS && i > blockIdx.x) {
                block_barrier();
                task = AttentionTask(batch, layer, i, heads, splits);
            }
            bf16 *kv_of_head = kv + task.head / GROUP_SIZE * batch.stride_head;
            if (separate_heads)
                attend<MIN_HEADS>(batch, layer, kv_of_head, task, tile, i == blockIdx.x, nullptr,
                                  false, scratch);
            else
                attend<HEADS_PER_BLOCK>(batch, layer, kv_of_head, task, tile, i == blockIdx.x,
                                        batch.split_results + i * HEADS_PER_BLOCK * (HEAD_DIM + 2),
                                        splits > 1, scratch);
        }
        if (MANY_TASKS && num_tasks > BLOCKS)
            task = AttentionTask(batch, layer, blockIdx.x, heads, splits);
        else if (task.end - task.begin > TILE)
            task.lookup_blocks(task.begin);
        grid_barrier([&] { residual.norm(layer.norms[1]); });
        if (splits > 1) {
            merge_splits(batch, splits);
            grid_barrier([] {});
        }
        multiply_and_add<TO_OUT, WIDTH / 64, WIDTH / 64>(batch, layer, ring, activations, zeros,
                                                         residual);
        grid_barrier([] {});

        multiply_normalised<TO_UP>(batch, &layer, ring, activations, zeros, partial_sums);
        grid_barrier([&] {
            residual.norm(index + 1 < batch.num_layers ? batch.layers[index + 1].norms[0]
                                                       : batch.norm);
        });

        multiply_and_add<TO_DOWN, SPLIT_COLUMN, DOWN_COLUMNS>(batch, layer, ring, activations,
                                                              zeros, residual);
        grid_barrier([] {});
    }
    if (VOCAB)
        multiply_normalised<TO_HEAD>(batch, nullptr, ring, activations, zeros, partial_sums);
    else {
        RmsFactors rms_factors;
        rms_factors.load(batch.squares);
        rms_factors.reduce(partial_sums);
        block_barrier();
    }
    ResidualSlice::for_each([&](int j, int, bool exists, int, int row, int output) {
        if (exists)
            batch.last[row * HIDDEN + output] =
                to_bf16(residual.hidden[j] * RmsFactors::of(partial_sums, row, batch.epsilon) *
                        residual.norm_weights[j]);
    });
}
