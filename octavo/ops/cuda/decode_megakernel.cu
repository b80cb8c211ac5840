// The decode megakernel: all layers of a decoder for up to eight tokens, in one launch. Read decode_megakernel.py first.
//
// One thread block runs on each multiprocessor, from the first layer to the last. In each block:
//
//     warp 8       is the producer warp. It copies weights into a ring of shared memory, in the order in which they are needed.
//                  It waits only for a free stage and for earlier copies, so memory stays busy while the other warps wait.
//     warps 0..7   multiply, normalise and attend. They synchronise with all other multiprocessors (grid_barrier) five times per
//                  layer, or six times if contexts are split.
//
// The phases of a layer. Each block computes its own outputs:
//
//     qkv      W_qkv norm(h)
//     attend   apply rope, write K and V to the cache, attend: one task per row, KV head and split of the context
//     out      h += W_out a
//     up       act(W_gate norm(h)) * (W_up norm(h))
//     down     h += W_down y
//
// After the last layer the kernel also computes logits = W_head norm(h), if the size of the vocabulary allows it.
//
// Norms. RMSNorm is norm(h) = f h w with one factor f per row, so W (f h w) = f W (h w). The owner of an output of h keeps it in
// registers. It publishes h w and its part of the sum of squares. The other blocks multiply with h w and apply f to the result, so
// only a copy of the activations stands between two products.
//
// Products. A unit is eight outputs, or four gate and four up outputs. Its weights arrive as chunks [16][8][64]: 16 columns of 64
// inputs. Tensor cores multiply 16 rows of activations, of which ROWS exist, with 8 outputs. Each warp takes two of the 16 columns
// of a chunk; the partial sums of the warps are added at the end of the phase. Shared memory is swizzled: the 16-byte part of a
// 128-byte line is stored at index part ^ (line % 8), as TMA writes it, so that eight lines are read without bank conflicts.
//
// decode_megakernel.py defines the constants: WARPS (that compute), ROWS, HIDDEN, INTER, HEADS, KV_HEADS, DIM, BLOCK (positions per
// KV block), BLOCKS (thread blocks), STAGES (chunks in the ring), SHARED (bytes of shared memory), PARTS (parts in which the
// activations of W_down are loaded: they are the largest, and take space from the ring), COPIES_IN_FLIGHT and COPIES_AT_BARRIER
// (see run_producer_warp), HEADS_PER_BLOCK (query heads per attention task), and the properties of the model: VOCAB (logits; 0
// means that another kernel computes them), GELU, QK_NORM, WINDOWS, BIASES.

#include "hopper.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int G = HEADS / KV_HEADS, WIDTH = HEADS * DIM, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int COLUMNS = 16, CHUNK = COLUMNS * 8 * 128;  // columns of 64 inputs; bytes of a chunk
constexpr int TILE = THREADS / 2, SHORT_CONTEXT = 256;  // positions per attention tile; longest context that is not split

__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceil_div(int all, int parts) { return (all + parts - 1) / parts; }

// The four products of a layer, and the product with the LM head.
enum Phase { TO_QKV, TO_OUT, TO_UP, TO_DOWN, PHASES, TO_HEAD = PHASES };
__device__ constexpr int units_of(int p) {
    return (p == TO_QKV ? QKV : p == TO_UP ? 2 * INTER : p == TO_HEAD ? VOCAB : HIDDEN) / 8;
}
__device__ constexpr int columns_of(int p) { return (p == TO_OUT ? WIDTH : p == TO_DOWN ? INTER : HIDDEN) / 64; }
// W_down is multiplied in two passes, split at SPLIT_COLUMN. The split is always the same, so that the bits of a row do not depend on
// the other rows of the batch.
constexpr int DOWN_COLUMNS = columns_of(TO_DOWN), TWO_THIRDS = ceil_div(2 * ceil_div(DOWN_COLUMNS, COLUMNS), 3) * COLUMNS;
constexpr int SPLIT_COLUMN = TWO_THIRDS < DOWN_COLUMNS ? TWO_THIRDS : DOWN_COLUMNS;
// Units whose partial sums a block holds until the epilogue: all of its units; for the LM head as many as for W_up.
__device__ constexpr int units_held(int p) { return ceil_div(units_of(p == TO_HEAD ? (int)TO_UP : p), BLOCKS); }

// Query heads per attention task for short contexts: the fewest for which there are enough blocks.
__device__ constexpr int min_heads(int n) {
    return n < HEADS_PER_BLOCK && HEADS_PER_BLOCK % (2 * n) == 0 && ROWS * HEADS / n > BLOCKS ? min_heads(2 * n) : n;
}
constexpr int MIN_HEADS = min_heads(1);                              // for short contexts; otherwise HEADS_PER_BLOCK
constexpr bool MANY_TASKS = ROWS * HEADS / HEADS_PER_BLOCK > BLOCKS;  // a block may have several attention tasks
constexpr int ATTENTION_FLOATS = DIM + HEADS_PER_BLOCK * (DIM + 8) + max_of(HEADS_PER_BLOCK * TILE, WARPS * HEADS_PER_BLOCK * DIM) + 3 * HEADS_PER_BLOCK + 4;
// Bytes of the activations and of the partial sums behind them, or of the scratch memory of attend().
__device__ constexpr int activation_bytes(int p) { return ROWS * (p == TO_DOWN && PARTS == 2 ? SPLIT_COLUMN : columns_of(p)) * 128; }
__device__ constexpr int product_bytes(int p) { return activation_bytes(p) + WARPS * units_held(p) * ROWS * 8 * 4; }
constexpr int PRODUCT_BYTES = max_of(max_of(product_bytes(TO_QKV), product_bytes(TO_OUT)), max_of(product_bytes(TO_UP), product_bytes(TO_DOWN)));
constexpr int SCRATCH_BYTES = ceil_div(max_of(PRODUCT_BYTES, ATTENTION_FLOATS * 4), 128) * 128;
static_assert(STAGES * CHUNK + SCRATCH_BYTES + STAGES * 16 + 16 + ROWS * WARPS * 4 + 4 <= SHARED, "decode_megakernel.py: shared_memory_layout()");

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
    const bf16 *h;   // [ROWS, HIDDEN]: embeddings
    bf16 *scaled_hidden;   // [ROWS, HIDDEN]: h times the weights of the next norm
    float *squares;  // [ROWS, HIDDEN / 8]: sums of eight squares of h
    bf16 *last;      // [ROWS, HIDDEN]: h after the last norm
    bf16 *logits;    // [ROWS, VOCAB]
    bf16 *qkv;       // [ROWS, QKV]
    bf16 *attention_out;  // [ROWS, WIDTH]
    bf16 *mlp_inner;     // [ROWS, INTER]
    float *parts;    // [ROWS, HEADS / HEADS_PER_BLOCK, splits, HEADS_PER_BLOCK, DIM + 2]: output, running maximum and sum of each split
    bf16 *kv;
    u64 s_block, s_layer, s_kind, s_head;  // strides of kv in elements
    const int *table;
    u64 s_table;
    const int *rows, *lengths;
    const long long *slots, *positions;
    u32 *barrier_count;
    int num_layers;
    float eps, scale;  // scale includes log2(e)
};

// ---- warp reductions -----------------------------------------------------------------------------------

__device__ __forceinline__ float round_to_bf16(float x) { return to_float(to_bf16(x)); }
__device__ __forceinline__ u32 pair(float a, float b) { return (u32)to_bf16(a) | (u32)to_bf16(b) << 16; }
__device__ __forceinline__ float sum_of_warp(float x) {
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
// Reduces N values over a warp: v[0] of a lane receives sum number lane / (32 / N). Each round halves the values per lane.
template <int N>
__device__ __forceinline__ void sums_of_warp(float (&v)[N]) {
    int apart = 16;
#pragma unroll
    for (int n = N / 2; n; n /= 2, apart /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) {
            const bool later = threadIdx.x & apart;
            const float given = later ? v[i] : v[i + n], held = later ? v[i + n] : v[i];
            v[i] = held + __shfl_xor_sync(~0u, given, apart);
        }
#pragma unroll
    for (; apart; apart /= 2) v[0] += __shfl_xor_sync(~0u, v[0], apart);
}
__device__ __forceinline__ float max_of_warp(float x) {
    for (int i = 16; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// All blocks load the same data. Each block permutes its threads so that the blocks do not access the same lines at once.
__device__ __forceinline__ int permuted_thread(int tid) { return tid ^ blockIdx.x % WARPS * 32; }

// ---- synchronisation ----------------------------------------------------------------------------------------

__device__ __forceinline__ void block_barrier() { named_barrier<THREADS>(); }

// A barrier over the computing warps of all multiprocessors. What they wrote before it is in the L2 cache, where load_l2() reads it.
// An `acquire` would also empty the L1 cache; it is enough that load_l2() is not moved before the block barrier in between.
// While it waits, each thread runs work(), which does not depend on the barrier: mostly loads.
struct GridBarrier {
    u32 *barrier_count, expected;
    volatile int *waiting;  // tells the producer warp that the block waits at the barrier

    template <class Work>
    __device__ __forceinline__ void operator()(Work work) {
        expected += BLOCKS;
        block_barrier();
        if (threadIdx.x == 0) *waiting = 1, grid_arrive(barrier_count);
        work();
        if (threadIdx.x == 0) {
            grid_wait(barrier_count, expected);
            *waiting = 0;
        }
        block_barrier();
    }
};

// ---- the ring of weights ----------------------------------------------------------------------------

struct Ring {
    u32 chunks, full, empty;  // addresses in shared memory
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

// Iterates over all weight chunks that this multiprocessor needs, in order.
struct TileIterator {
    int layers, layer = 0, phase = 0, unit = blockIdx.x, begin = 0, column = 0;  // begin: first column of this pass

    __device__ __forceinline__ int row() const { return unit * (phase == TO_UP ? 4 : 8); }
    __device__ __forceinline__ bool has_second_pass() const { return phase == TO_DOWN && begin == 0 && SPLIT_COLUMN < DOWN_COLUMNS; }  // W_down has a second pass
    __device__ __forceinline__ void next() {
        column += COLUMNS;
        if (column < (has_second_pass() ? SPLIT_COLUMN : columns_of(phase))) return;
        column = begin, unit += BLOCKS;
        skip_empty_units();
    }
    __device__ __forceinline__ void skip_empty_units() {  // a small product leaves some blocks without a unit
        while (!done() && unit >= units_of(phase)) {
            unit = blockIdx.x, column = begin = has_second_pass() ? SPLIT_COLUMN : 0;
            if (begin == 0 && ++phase >= PHASES) layer++, phase = layer == layers ? (int)TO_HEAD : 0;
        }
    }
    __device__ __forceinline__ bool done() const { return layer == layers + (VOCAB > 0); }
};

// The producer warp: keeps the ring full. At most COPIES_IN_FLIGHT copies are in flight: more would not arrive sooner, and the loads
// of the other warps would queue behind them. While the block waits at a grid barrier the limit is COPIES_AT_BARRIER.
__device__ __forceinline__ void run_producer_warp(Ring ring, const Maps *maps, const Map *head, int layers, volatile int *at_barrier) {
    TileIterator tile_iterator{layers};
    tile_iterator.skip_empty_units();
    if (VOCAB) prefetch_map(head);
    for (int i = 0; !tile_iterator.done(); i++, tile_iterator.next(), ring.next()) {
        if (i == 0 || (tile_iterator.phase == TO_OUT && tile_iterator.column == 0))
            for (int j = 0; j < PHASES; j++) prefetch_map(&maps[min(tile_iterator.layer + 1, layers - 1)].of[j]);
        const u32 full = ring.full + ring.at * 8;
        const int copies = COPIES_IN_FLIGHT > COPIES_AT_BARRIER && *at_barrier ? COPIES_AT_BARRIER : COPIES_IN_FLIGHT, before = ring.at - copies;
        mbarrier_wait(ring.empty + ring.at * 8, ring.parity ^ 1);
        if (i >= copies) mbarrier_wait(ring.full + (before < 0 ? before + STAGES : before) * 8, before < 0 ? ring.parity ^ 1 : ring.parity);
        mbarrier_expect<CHUNK>(full);
        const Map *map = tile_iterator.phase == TO_HEAD ? head : &maps[tile_iterator.layer].of[tile_iterator.phase];
        copy(ring.chunks + ring.at * CHUNK, map, tile_iterator.row(), tile_iterator.column, full);
    }
}

// Norm weights and layer descriptors are small, but each access would stall. All of them are prefetched into L2 at the start.
__device__ __forceinline__ void prefetch_small(const Batch &t) {
    for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < t.num_layers; i += BLOCKS * WARPS)
        for (int at = threadIdx.x % 32; at < HIDDEN / 32; at += 32) {
            prefetch_l2(t.layers[i].norms[0] + at * 32);
            prefetch_l2(t.layers[i].norms[1] + at * 32);
            if (at < sizeof(Maps) / 128) prefetch_l2((const char *)(t.maps + i) + at * 128);
        }
}

// Multiplies columns BEGIN .. END - 1 of the activations in shared memory with units first_unit .. end - 1. Each block has every
// BLOCKS-th unit, at most `held`. The partial sums of each warp go to `sums` [WARPS, held, ROWS, 8]; a second pass adds to them.
template <int BEGIN, int END>
__device__ __forceinline__ void product(Ring &ring, int first_unit, int end, int held, u32 x, u32 zeros, float *sums) {
    const int tid = thread();
    constexpr int EACH = COLUMNS / WARPS * 2;  // pieces of 32 inputs per warp and chunk
    const int warp = tid / 32, lane = tid % 32, line = lane % 8, part = lane / 8;
    float *to = sums + (warp * held * ROWS + lane / 4) * 8 + lane % 4 * 2;
#pragma unroll 1
    for (int unit = first_unit + blockIdx.x; unit < end; unit += BLOCKS, to += ROWS * 8) {
        float c[4][4] = {};
#pragma unroll 1
        for (int first = 0; first < END - BEGIN; first += COLUMNS) {
            const u32 chunk = ring.chunks + ring.at * CHUNK + line * 128;
            u32 a[EACH][4], b[EACH][4];
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int column = min(first + j / 2 * WARPS + warp, END - BEGIN - 1);  // beyond the end the weights are zero
                ldmatrix_x4(a[j], line < ROWS ? x + (column * ROWS + line) * 128 + ((j % 2 * 4 + part) ^ line) * 16 : zeros);
            }
            mbarrier_wait(ring.full + ring.at * 8, ring.parity);
#pragma unroll
            for (int j = 0; j < EACH; j++) ldmatrix_x4(b[j], chunk + (j / 2 * WARPS + warp) * 1024 + ((j % 2 * 4 + part) ^ line) * 16);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                multiply(c[j % 2 * 2], a[j][0], a[j][1], b[j][0], b[j][1]);
                multiply(c[j % 2 * 2 + 1], a[j][2], a[j][3], b[j][2], b[j][3]);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.empty + ring.at * 8);
            ring.next();
        }
        if (lane / 4 >= ROWS) continue;
        float2 sum = make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0], c[0][1] + c[1][1] + c[2][1] + c[3][1]);
        if (BEGIN) sum.x += to[0], sum.y += to[1];
        *(float2 *)to = sum;
    }
}

// Adds the partial sums of all warps.
__device__ __forceinline__ float sum_over_warps(const float *sums, int stride) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += sums[w * stride];
    return value;
}

// ---- the residual stream and its norms -------------------------------------------------------------------------------

// The slice of the residual stream h that a thread owns: the same outputs for W_out and for W_down.
struct ResidualSlice {
    static constexpr int ELEMENTS = units_held(TO_OUT) * ROWS * 8, PER_THREAD = ceil_div(ELEMENTS, THREADS);
    float h[PER_THREAD], w[PER_THREAD];  // w: weights of the next norm

    template <class Work>
    static __device__ __forceinline__ void for_each(Work work) {  // work(j, index among the sums, exists, unit, row, output)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const int i = thread() + j * THREADS, unit = blockIdx.x + i / 8 / ROWS * BLOCKS;
            work(j, i, i < ELEMENTS && unit < units_of(TO_OUT), unit, i / 8 % ROWS, unit * 8 + i % 8);
        }
    }
    __device__ __forceinline__ void begin(const bf16 *from) {
        for_each([&](int j, int, bool is, int, int row, int output) { h[j] = is ? to_float(from[row * HIDDEN + output]) : 0; });
    }
    __device__ __forceinline__ void norm(const float *weight) {
        for_each([&](int j, int, bool is, int, int, int output) { w[j] = is ? weight[output] : 0; });
    }
    __device__ __forceinline__ void add(const float *sums, const bf16 *bias) {
        for_each([&](int j, int place, bool is, int, int, int output) {
            if (!is) return;
            float value = sum_over_warps(sums + place, ELEMENTS);
            if (BIASES && bias) value += to_float(bias[output]);
            h[j] = round_to_bf16(h[j] + value);
        });
    }
    __device__ __forceinline__ void publish(const Batch &t) const {
        for_each([&](int j, int, bool is, int unit, int row, int output) {
            float square = h[j] * h[j];
            for (int i = 4; i; i /= 2) square += __shfl_xor_sync(~0u, square, i);
            if (!is) return;
            t.scaled_hidden[row * HIDDEN + output] = to_bf16(h[j] * w[j]);
            if (output % 8 == 0) t.squares[row * (HIDDEN / 8) + unit] = square;
        });
    }
};

// The RMSNorm factor f of each row. Each thread loads a part of the squares, which are reduced during the product.
struct RmsFactors {
    static constexpr int N = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS, UNITS = HIDDEN / 8, PER_THREAD = ceil_div(UNITS, THREADS);
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
        if (tid % (32 / N) == 0 && tid % 32 / (32 / N) < ROWS) partial_sums[tid % 32 / (32 / N) * WARPS + tid / 32] = sums[0];
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

// The epilogue of a product with h w, from unit `first` on: applies f, the bias and the activation, and stores the result.
template <int PHASE>
__device__ __forceinline__ void epilogue(const Batch &t, const Layer *layer, int first, int end, const float *sums,
                                       const float *partial_sums) {
    const int tid = thread();
    constexpr int WIDE = PHASE == TO_UP ? 4 : 8, STRIDE = units_held(PHASE) * ROWS * 8;
    const bf16 *bias = BIASES && PHASE != TO_HEAD ? layer->biases[PHASE] : nullptr;
    for (int i = tid; i < units_held(PHASE) * ROWS * WIDE; i += THREADS) {
        const int place = i / WIDE, unit = first + blockIdx.x + place / ROWS * BLOCKS, row = place % ROWS,
                  output = unit * WIDE + i % WIDE;
        if (unit >= end) continue;
        const float *at = sums + place * 8 + i % WIDE, f = RmsFactors::of(partial_sums, row, t.eps);
        float value = sum_over_warps(at, STRIDE) * f;
        if (BIASES && bias) value += to_float(bias[output]);
        if (PHASE == TO_UP) {
            float up = sum_over_warps(at + 4, STRIDE) * f;
            if (BIASES && bias) up += to_float(bias[INTER + output]);
            value = round_to_bf16(value), up = round_to_bf16(up);
            const float z = GELU ? 1.5957691216057308f * (value + 0.044715f * value * value * value) : value;
            value = value / (1 + exp2_(-1.4426950408889634f * z)) * up;
        }
        bf16 *to = PHASE == TO_QKV  ? t.qkv + row * QKV
                   : PHASE == TO_UP ? t.mlp_inner + row * INTER
                                    : t.logits + (u64)row * VOCAB;
        to[output] = to_bf16(value);
    }
}

// ---- activations, into shared memory --------------------------------------------------------------------------

__device__ __forceinline__ char *swizzled(char *x, int row, int octet) {  // swizzled address of eight neighbouring inputs
    return x + (octet / 8 * ROWS + row) * 128 + ((octet % 8) ^ (row % 8)) * 16;
}

// Loads columns BEGIN .. END - 1 of ALL.
template <int ALL, int BEGIN, int END>
__device__ __forceinline__ void load_activations(char *x, const bf16 *from) {
    const int tid = permuted_thread(thread());
#pragma unroll 2
    for (int i = tid; i < (END - BEGIN) * 8; i += THREADS) {
        uint4 v[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) v[row] = load_l2(from + row * ALL * 64 + BEGIN * 64 + i * 8);
#pragma unroll
        for (int row = 0; row < ROWS; row++) *(uint4 *)swizzled(x, row, i) = v[row];
    }
    block_barrier();
}

// The same in two steps: the data is loaded into registers during another product and stored to shared memory afterwards.
template <int ALL, int BEGIN, int END>
struct DeferredLoad {
    static constexpr int N = ceil_div((END - BEGIN) * 8, THREADS);
    uint4 v[N][ROWS];

    __device__ __forceinline__ void load(const bf16 *from) {
        const int tid = permuted_thread(thread());
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const int i = min(tid + j * THREADS, (END - BEGIN) * 8 - 1);
                v[j][row] = load_l2(from + row * ALL * 64 + BEGIN * 64 + i * 8);
            }
    }
    __device__ __forceinline__ void store(char *x) const {
        const int tid = permuted_thread(thread());
        block_barrier();  // the previous contents are no longer needed
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                if (tid + j * THREADS < (END - BEGIN) * 8) *(uint4 *)swizzled(x, row, tid + j * THREADS) = v[j][row];
        block_barrier();
    }
};

// ---- attention --------------------------------------------------------------------------------------

// An attention task of a block: some query heads of a row that share a KV head, over positions begin .. end - 1.
struct AttentionTask {
    int row, head, begin, end;  // head: first query head
    bool newest;                // the last position is the token of this step
    const int *table;
    u64 slot;                            // where the new key is written
    int key_block, value_block;            // KV blocks of the first tile
    float cos[DIM / 64], sin[DIM / 64];  // for dimension lane + 32 i

    __device__ __forceinline__ AttentionTask(const Batch &t, const Layer &layer, int i, int heads, int splits) {
        row = i / (HEADS / heads * splits), head = i / splits * heads % HEADS;
        const int length = t.lengths[row], first = layer.window ? max(0, length - (int)layer.window) : 0;
        const int part = ceil_div(length - first, splits);
        begin = min(first + i % splits * part, length), end = min(begin + part, length);
        newest = begin < end && end == length;
        table = t.table + t.rows[row] * t.s_table;
        slot = t.slots[row] / BLOCK * t.s_block + t.slots[row] % BLOCK * DIM;
        lookup_blocks(begin);
        const float *angles = layer.angles + t.positions[row] * DIM + threadIdx.x % 32;
        for (int j = 0; j < DIM / 64; j++) cos[j] = angles[32 * j], sin[j] = angles[DIM / 2 + 32 * j];
    }
    __device__ __forceinline__ void lookup_blocks(int first) {
        const int tid = thread();
        const int key = first + tid / 2, value = first + tid / 32 * 16 + tid % 16;
        key_block = key < end ? table[key / BLOCK] : 0, value_block = value < end ? table[value / BLOCK] : 0;
    }
};

// Keys and values of a tile in registers. Two threads share the key of a position. A warp holds the values of 16 positions, AT_ONCE
// at a time; a lane holds eight dimensions.
struct KvTile {
    static constexpr int LANES = DIM / 8, AT_ONCE = 32 / LANES;
    uint4 k[DIM / 16], v[16 / AT_ONCE];

    __device__ __forceinline__ void load(const Batch &t, const bf16 *kv, const AttentionTask &unit, int first) {
        const int tid = thread();
        const int p = first + tid / 2;
        const bf16 *key = kv + unit.key_block * t.s_block + p % BLOCK * DIM + tid % 2 * (DIM / 2);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) k[i] = p < unit.end ? *(const uint4 *)(key + i * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; i++) {
            const u64 block = __shfl_sync(~0u, unit.value_block, position(tid, i));
            const int at = first + tid / 32 * 16 + position(tid, i);
            const bf16 *value = kv + t.s_kind + block * t.s_block + at % BLOCK * DIM + tid % LANES * 8;
            v[i] = at < unit.end ? *(const uint4 *)value : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ int position(int tid, int i) { return i * AT_ONCE + tid % 32 / LANES; }  // index among the 16 positions of the warp
};

// Loads the vector of one head, applies the q or k norm if the model has one, and applies rope. A lane holds dimensions lane + 32 i and
// DIM / 2 + lane + 32 i.
__device__ __forceinline__ void norm_and_rope(const bf16 *from, const float *norm, const AttentionTask &unit, float eps, float (&a)[DIM / 64],
                                     float (&b)[DIM / 64]) {
    const int tid = thread();
    const int lane = tid % 32;
    float squares = 0;
    for (int i = 0; i < DIM / 64; i++) {
        a[i] = load_l2_bf16(from + lane + 32 * i), b[i] = load_l2_bf16(from + DIM / 2 + lane + 32 * i);
        squares += a[i] * a[i] + b[i] * b[i];
    }
    if (QK_NORM) {
        const float factor = rsqrtf(sum_of_warp(squares) / DIM + eps);
        for (int i = 0; i < DIM / 64; i++) {
            a[i] = round_to_bf16(a[i] * factor * norm[lane + 32 * i]);
            b[i] = round_to_bf16(b[i] * factor * norm[DIM / 2 + lane + 32 * i]);
        }
    }
    for (int i = 0; i < DIM / 64; i++) {
        const float x = a[i], y = b[i];
        a[i] = x * unit.cos[i] - y * unit.sin[i], b[i] = y * unit.cos[i] + x * unit.sin[i];
    }
}

// `tile`, if loaded, is the first tile of the task, loaded before the key and value of this step existed. They are inserted here and
// written to the cache.
template <int N>  // number of query heads
__device__ __forceinline__ void attend(const Batch &t, const Layer &layer, bf16 *kv, AttentionTask &unit, KvTile &tile, bool loaded,
                                       float *part, bool partial, float *scratch) {
    const int tid = thread();
    constexpr int HALF = DIM / 2 + 4;  // stride of half a query, padded so that two threads read both halves without bank conflicts
    bf16 *new_key = (bf16 *)scratch, *new_value = new_key + DIM;
    float *q = scratch + DIM, *running_max = q + N * 2 * HALF, *sum = running_max + N, *rescale = sum + N, *score = running_max + ceil_div(3 * N, 4) * 4;
    float *acc = score;  // reuses the memory of the scores
    const int warp = tid / 32, lane = tid % 32, half = tid % 2;
    const bf16 *mine = t.qkv + unit.row * QKV;
    const int key_head = unit.head / G;
    const bool writes = unit.newest && unit.head % G == 0;
    bf16 *to = kv + unit.slot;
    for (int i = warp; i < N + 2; i += WARPS) {
        if (i > N) {
            for (int d = lane; d < DIM; d += 32) {
                const bf16 v = to_bf16(load_l2_bf16(mine + (HEADS + KV_HEADS + key_head) * DIM + d));
                new_value[d] = v;
                if (writes) to[t.s_kind + d] = v;
            }
            continue;
        }
        float a[DIM / 64], b[DIM / 64];
        norm_and_rope(mine + (i < N ? unit.head + i : HEADS + key_head) * DIM, i < N ? layer.q_norm : layer.k_norm, unit, t.eps, a, b);
        for (int j = 0; j < DIM / 64; j++) {
            const int d = lane + 32 * j;
            if (i < N) q[i * 2 * HALF + d] = round_to_bf16(a[j]), q[(i * 2 + 1) * HALF + d] = round_to_bf16(b[j]);
            else {
                new_key[d] = to_bf16(a[j]), new_key[DIM / 2 + d] = to_bf16(b[j]);
                if (writes) to[d] = new_key[d], to[DIM / 2 + d] = new_key[DIM / 2 + d];
            }
        }
    }
    if (tid < N) running_max[tid] = -INFINITY, sum[tid] = 0;
    float o[N][8];
#pragma unroll
    for (int g = 0; g < N; g++)
#pragma unroll
        for (int j = 0; j < 8; j++) o[g][j] = 0;
    block_barrier();
#pragma unroll 1
    for (int first = unit.begin; first < unit.end; first += TILE) {
        const int p = first + tid / 2, last = unit.newest ? unit.end - 1 : -1;
        if (!loaded || first > unit.begin) unit.lookup_blocks(first), tile.load(t, kv, unit, first);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++)
            if (p == last) tile.k[i] = ((const uint4 *)new_key)[half * (DIM / 16) + i];
#pragma unroll
        for (int i = 0; i < 16 / KvTile::AT_ONCE; i++)
            if (first + warp * 16 + KvTile::position(tid, i) == last) tile.v[i] = ((const uint4 *)new_value)[lane % KvTile::LANES];
        float s[N];
#pragma unroll
        for (int g = 0; g < N; g++) s[g] = 0;
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            const uint4 k = tile.k[i];
            const float f[8] = {low(k.x), high(k.x), low(k.y), high(k.y), low(k.z), high(k.z), low(k.w), high(k.w)};
#pragma unroll
            for (int g = 0; g < N; g++) {
                const float4 *from = (const float4 *)(q + (g * 2 + half) * HALF + i * 8);
                const float4 x = from[0], y = from[1];
                s[g] += f[0] * x.x + f[1] * x.y + f[2] * x.z + f[3] * x.w + f[4] * y.x + f[5] * y.y + f[6] * y.z + f[7] * y.w;
            }
        }
#pragma unroll
        for (int g = 0; g < N; g++) {
            s[g] += __shfl_xor_sync(~0u, s[g], 1);
            if (half == 0) score[g * TILE + tid / 2] = p < unit.end ? s[g] * t.scale : -INFINITY;
        }
        block_barrier();
        for (int g = warp; g < N; g += WARPS) {
            float *row = score + g * TILE, x[TILE / 32], before = running_max[g], top = before, all = 0;
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) x[i] = row[lane + 32 * i], top = fmaxf(top, x[i]);
            top = max_of_warp(top);
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) all += row[lane + 32 * i] = exp2_(x[i] - top);
            all = sum_of_warp(all);
            if (lane == 0) rescale[g] = exp2_(before - top), sum[g] = sum[g] * exp2_(before - top) + all, running_max[g] = top;
        }
        block_barrier();
#pragma unroll
        for (int g = 0; g < N; g++)
#pragma unroll
            for (int j = 0; j < 8; j++) o[g][j] *= rescale[g];
#pragma unroll
        for (int i = 0; i < 16 / KvTile::AT_ONCE; i++) {
            const uint4 v = tile.v[i];
            const float f[8] = {low(v.x), high(v.x), low(v.y), high(v.y), low(v.z), high(v.z), low(v.w), high(v.w)};
#pragma unroll
            for (int g = 0; g < N; g++) {
                const float weight = score[g * TILE + warp * 16 + KvTile::position(tid, i)];
#pragma unroll
                for (int j = 0; j < 8; j++) o[g][j] += weight * f[j];
            }
        }
        block_barrier();
    }
#pragma unroll
    for (int g = 0; g < N; g++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = KvTile::LANES; i < 32; i *= 2) o[g][j] += __shfl_xor_sync(~0u, o[g][j], i);
        if (lane < KvTile::LANES) {
            float4 *to = (float4 *)(acc + (warp * N + g) * DIM + lane * 8);
            to[0] = make_float4(o[g][0], o[g][1], o[g][2], o[g][3]), to[1] = make_float4(o[g][4], o[g][5], o[g][6], o[g][7]);
        }
    }
    block_barrier();
    for (int i = tid; i < N * DIM; i += THREADS) {
        float s = 0;
        for (int w = 0; w < WARPS; w++) s += acc[w * N * DIM + i];
        if (partial) part[i / DIM * (DIM + 2) + i % DIM] = s;
        else t.attention_out[unit.row * WIDTH + unit.head * DIM + i] = to_bf16(s / sum[i / DIM]);
    }
    if (partial && tid < N) part[tid * (DIM + 2) + DIM] = running_max[tid], part[tid * (DIM + 2) + DIM + 1] = sum[tid];
}

// Merges the splits of each head by their running maxima; one warp per head.
__device__ __forceinline__ void merge_splits(const Batch &t, int splits) {
    const int tid = thread();
    const int lane = tid % 32;
    for (int i = blockIdx.x * WARPS + tid / 32; i < ROWS * HEADS; i += BLOCKS * WARPS) {
        const float *part = t.parts + (i / HEADS_PER_BLOCK * splits * HEADS_PER_BLOCK + i % HEADS_PER_BLOCK) * (DIM + 2);
        float top = -INFINITY, all = 0, o[DIM / 32];
        for (int j = 0; j < DIM / 32; j++) o[j] = 0;
        for (int s = 0; s < splits; s++) top = fmaxf(top, load_l2_float(part + s * HEADS_PER_BLOCK * (DIM + 2) + DIM));
        for (int s = 0; s < splits; s++) {
            const float *p = part + s * HEADS_PER_BLOCK * (DIM + 2);
            const float weight = exp2_(load_l2_float(p + DIM) - top);
            all += weight * load_l2_float(p + DIM + 1);
            for (int j = 0; j < DIM / 32; j++) o[j] += weight * load_l2_float(p + lane + 32 * j);
        }
        for (int j = 0; j < DIM / 32; j++) t.attention_out[i * DIM + lane + 32 * j] = to_bf16(o[j] / all);
    }
}

// ---- the kernel --------------------------------------------------------------------------------------

// A product with norm(h): qkv, gate and up, or the LM head.
template <int PHASE>
__device__ __forceinline__ void multiply_normalised(const Batch &t, const Layer *layer, Ring &ring, char *x, u32 zeros,
                                                    float *partial_sums) {
    constexpr int AT_ONCE = units_held(PHASE) * BLOCKS;  // units of all blocks per round
    float *sums = (float *)(x + activation_bytes(PHASE));
    RmsFactors rms_factors;
    load_activations<HIDDEN / 64, 0, HIDDEN / 64>(x, t.scaled_hidden);
    rms_factors.load(t.squares);  // loaded while the product runs
#pragma unroll 1
    for (int first = 0; first < units_of(PHASE); first += AT_ONCE) {
        const int end = min(first + AT_ONCE, units_of(PHASE));
        if (first) block_barrier();  // the previous partial sums have been read
        product<0, HIDDEN / 64>(ring, first, end, units_held(PHASE), shared(x), zeros, sums);
        if (first == 0) rms_factors.reduce(partial_sums);
        block_barrier();
        epilogue<PHASE>(t, layer, first, end, sums, partial_sums);
    }
}

// A product that is added to h, in two passes if FIRST is less than ALL.
template <int PHASE, int FIRST, int ALL>
__device__ __forceinline__ void multiply_and_add(const Batch &t, const Layer &layer, Ring &ring, char *x, u32 zeros, ResidualSlice &residual) {
    constexpr bool APART = FIRST < ALL && PARTS == 2;
    const bf16 *from = PHASE == TO_OUT ? t.attention_out : t.mlp_inner;
    float *sums = (float *)(x + activation_bytes(PHASE));
    load_activations<ALL, 0, APART ? FIRST : ALL>(x, from);
    if constexpr (FIRST < ALL) {
        DeferredLoad<ALL, FIRST, ALL> rest;
        if constexpr (APART) rest.load(from);
        product<0, FIRST>(ring, 0, units_of(PHASE), units_held(PHASE), shared(x), zeros, sums);
        if constexpr (APART) rest.store(x);
        product<FIRST, ALL>(ring, 0, units_of(PHASE), units_held(PHASE), shared(x) + (APART ? 0 : FIRST * ROWS * 128), zeros, sums);
    } else product<0, ALL>(ring, 0, units_of(PHASE), units_held(PHASE), shared(x), zeros, sums);
    block_barrier();
    residual.add(sums, BIASES ? layer.biases[PHASE] : nullptr);
    residual.publish(t);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_megakernel(const __grid_constant__ Batch t) {
    SHARED_MEMORY(memory);
    char *x = memory + STAGES * CHUNK;
    float *scratch = (float *)x;  // scratch memory of attend()
    u64 *barriers = (u64 *)(x + SCRATCH_BYTES);
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
        if (threadIdx.x == THREADS) run_producer_warp(ring, t.maps, t.head, t.num_layers, at_barrier);
        return;
    }
    prefetch_small(t);
    const u32 zeros = shared(zero_line);
    GridBarrier grid_barrier{t.barrier_count, 0, at_barrier};
    int longest = 0;
    for (int i = 0; i < ROWS; i++) longest = max(longest, t.lengths[i]);
    // With short contexts, query heads that share a KV head run as separate tasks: reading the keys twice is faster than waiting.
    const bool apart = longest <= SHORT_CONTEXT && ROWS * HEADS / MIN_HEADS <= BLOCKS;
    const int heads = apart ? MIN_HEADS : HEADS_PER_BLOCK, groups = ROWS * HEADS / heads;
    const int splits = longest <= SHORT_CONTEXT ? 1 : max(1, min(BLOCKS / groups, ceil_div(longest, TILE))), units = groups * splits;
    ResidualSlice residual;
    residual.begin(t.h);
    residual.norm(t.layers->norms[0]);
    residual.publish(t);
    AttentionTask unit(t, *t.layers, min((int)blockIdx.x, units - 1), heads, splits);
    KvTile tile;
    grid_barrier([] {});
#pragma unroll 1
    for (int index = 0; index < t.num_layers; index++) {
        const Layer &layer = t.layers[index];
        bf16 *kv = t.kv + index * t.s_layer;

        multiply_normalised<TO_QKV>(t, &layer, ring, x, zeros, partial_sums);
        grid_barrier([&] {
            if (WINDOWS) unit = AttentionTask(t, layer, min((int)blockIdx.x, units - 1), heads, splits);
            if (blockIdx.x < units) tile.load(t, kv + unit.head / G * t.s_head, unit, unit.begin);
        });

        for (int i = blockIdx.x; i < units; i += BLOCKS) {
            if (MANY_TASKS && i > blockIdx.x) {
                block_barrier();
                unit = AttentionTask(t, layer, i, heads, splits);
            }
            bf16 *kv_of_head = kv + unit.head / G * t.s_head;
            if (apart) attend<MIN_HEADS>(t, layer, kv_of_head, unit, tile, i == blockIdx.x, nullptr, false, scratch);
            else
                attend<HEADS_PER_BLOCK>(t, layer, kv_of_head, unit, tile, i == blockIdx.x, t.parts + i * HEADS_PER_BLOCK * (DIM + 2), splits > 1,
                                 scratch);
        }
        if (MANY_TASKS && units > BLOCKS) unit = AttentionTask(t, layer, blockIdx.x, heads, splits);
        else if (unit.end - unit.begin > TILE) unit.lookup_blocks(unit.begin);
        grid_barrier([&] { residual.norm(layer.norms[1]); });
        if (splits > 1) {
            merge_splits(t, splits);
            grid_barrier([] {});
        }
        multiply_and_add<TO_OUT, WIDTH / 64, WIDTH / 64>(t, layer, ring, x, zeros, residual);
        grid_barrier([] {});

        multiply_normalised<TO_UP>(t, &layer, ring, x, zeros, partial_sums);
        grid_barrier([&] { residual.norm(index + 1 < t.num_layers ? t.layers[index + 1].norms[0] : t.norm); });

        multiply_and_add<TO_DOWN, SPLIT_COLUMN, DOWN_COLUMNS>(t, layer, ring, x, zeros, residual);
        grid_barrier([] {});
    }
    if (VOCAB) multiply_normalised<TO_HEAD>(t, nullptr, ring, x, zeros, partial_sums);
    else {
        RmsFactors rms_factors;
        rms_factors.load(t.squares);
        rms_factors.reduce(partial_sums);
        block_barrier();
    }
    ResidualSlice::for_each([&](int j, int, bool is, int, int row, int output) {
        if (is) t.last[row * HIDDEN + output] = to_bf16(residual.h[j] * RmsFactors::of(partial_sums, row, t.eps) * residual.w[j]);
    });
}
