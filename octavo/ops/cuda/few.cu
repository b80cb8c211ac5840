// All layers of a decoder for a few rows, one token each, in one launch. Read few.py first.
//
// One block of threads a multiprocessor, all alive from the first layer to the last. In each:
//
//     warp 8       asks for weights, in the order in which they will be needed, and waits only for room in the ring and for the
//                  copies before: while arithmetic waits for what other multiprocessors are still computing, memory delivers
//     warps 0..7   multiply, normalise, attend. They meet those of all other multiprocessors (all_meet) five times a layer, six
//                  times where contexts are split
//
//     qkv      x = norm(h);  its outputs of W_qkv x
//     attend   rotate, write K and V, attend: a (row, key head, part of the context) each
//     out      its outputs of h += W_out a
//     up       x = norm(h);  its outputs of act(W_gate x) * (W_up x)
//     down     its outputs of h += W_down y
//
// Products. A unit is eight outputs (or four of gate and four of up), which come as chunks [16][8][64]: of 16 times 64 inputs.
// Tensor cores multiply [16 rows of x, of which ROWS exist] with [8 outputs]: each warp takes two of a chunk's 16 columns, and
// what the warps have summed up is added at the end of the phase. 16-byte parts of a line of 128 bytes are stored exchanged
// (part ^ line % 8), which is how copies of that kind write them, so that eight lines are read without waiting for each other.
//
// Constants come from few.py: WARPS (that compute), ROWS, HIDDEN, INTER, HEADS, KV_HEADS, DIM, BLOCK (positions a block of KV),
// BLOCKS (of threads), SLOTS (chunks the ring holds), SHARED (bytes), FLYING (deliver), TOGETHER (heads), and what the model has:
// GELU, QK_NORM, WINDOWS, BIASES.

#include "hopper.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int G = HEADS / KV_HEADS, WIDTH = HEADS * DIM, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int COLUMNS = 16, CHUNK = COLUMNS * 8 * 128;  // columns of 64 inputs, bytes
constexpr int TILE = THREADS / 2, SHORT = 256;  // positions that are attended to at once, and of a context that is not split

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int each(int all, int parts) { return (all + parts - 1) / parts; }
constexpr int WIDEST = most(most(HIDDEN, WIDTH), INTER);

// The four products of a layer.
enum Phase { TO_QKV, TO_OUT, TO_UP, TO_DOWN, PHASES };
__device__ constexpr int units_of(int p) { return (p == TO_QKV ? QKV : p == TO_UP ? 2 * INTER : HIDDEN) / 8; }
__device__ constexpr int columns_of(int p) { return (p == TO_OUT ? WIDTH : p == TO_DOWN ? INTER : HIDDEN) / 64; }
constexpr int MOST_UNITS = each(most(most(units_of(TO_QKV), units_of(TO_OUT)), units_of(TO_UP)), BLOCKS);

// How many heads a block attends to: as few as there are blocks for.
__device__ constexpr int fewest(int n) {
    return n < TOGETHER && TOGETHER % (2 * n) == 0 && ROWS * HEADS / n > BLOCKS ? fewest(2 * n) : n;
}
constexpr int FEWEST = fewest(1);                              // where contexts are short; else TOGETHER
constexpr bool MANY_UNITS = ROWS * HEADS / TOGETHER > BLOCKS;  // a block may have several
constexpr int SCORES = DIM + TOGETHER * (DIM + 8) + most(TOGETHER * TILE, WARPS * TOGETHER * DIM) + 3 * TOGETHER + 4;
constexpr int SCRATCH = each(most(WARPS * MOST_UNITS * ROWS * 8, SCORES) * 4, 128) * 128;  // bytes: sums, or what attend() keeps
static_assert(SLOTS * CHUNK + ROWS * WIDEST * 2 + SCRATCH + SLOTS * 16 + 16 <= SHARED, "few.py: room()");
static_assert(ROWS <= BLOCKS, "a block each for the last norm");

struct Layer {
    const float *norms[2], *q_norm, *k_norm, *angles;  // of attention and of the MLP
    const bf16 *biases[PHASES];
    u64 window;
};
struct Maps {  // of a layer's matrices, as TMA sees them
    Map of[PHASES];
};

struct Batch {  // what few.py passes
    const Layer *layers;
    const Maps *maps;
    const float *norm;
    bf16 *h;         // [ROWS, HIDDEN], in and, normalised, out
    bf16 *qkv;       // [ROWS, QKV]
    bf16 *attended;  // [ROWS, WIDTH]
    bf16 *inner;     // [ROWS, INTER]
    float *parts;    // [ROWS, HEADS / TOGETHER, splits, TOGETHER, DIM + 2]: sums, peak and total of each
    bf16 *kv;
    u64 s_block, s_layer, s_kind, s_head;  // strides of kv in elements
    const int *table;
    u64 s_table;
    const int *rows, *lengths;
    const long long *slots, *positions;
    u32 *met;
    int num_layers;
    float eps, scale;  // scale: times log2(e)
};

// ---- small things -----------------------------------------------------------------------------------

__device__ __forceinline__ float rounded(float x) { return wide(narrow(x)); }
__device__ __forceinline__ u32 pair(float a, float b) { return (u32)narrow(a) | (u32)narrow(b) << 16; }
__device__ __forceinline__ float sum_of_warp(float x) {
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}
// The sums of N numbers over a warp: sum number lane / (32 / N) in v[0]. Half the lanes go on with half of the numbers each time.
template <int N>
__device__ __forceinline__ void sums_of_warp(float (&v)[N]) {
    int apart = 16;
#pragma unroll
    for (int n = N / 2; n; n /= 2, apart /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) {
            const bool later = threadIdx.x & apart;
            const float given = later ? v[i] : v[i + n], kept = later ? v[i + n] : v[i];
            v[i] = kept + __shfl_xor_sync(~0u, given, apart);
        }
#pragma unroll
    for (; apart; apart /= 2) v[0] += __shfl_xor_sync(~0u, v[0], apart);
}
__device__ __forceinline__ float max_of_warp(float x) {
    for (int i = 16; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// Which of a block's threads loads what: in each block another order, since all of them load the same.
__device__ __forceinline__ int turned(int tid) { return tid ^ blockIdx.x % WARPS * 32; }

// ---- meeting ----------------------------------------------------------------------------------------

__device__ __forceinline__ void block_meets() { meet<THREADS>(); }

// All computing warps of all multiprocessors have come here, and what they wrote before is in the L2 cache, where fresh() reads
// it. `acquire` would empty the L1 cache too, and with it what is kept there; that fresh() is not carried out before the barrier
// that stands between is enough. Meanwhile each does what work() says, which depends on none of it: loads, for the most part.
template <class Work>
__device__ __forceinline__ void all_meet(u32 *met, u32 &times, Work work) {
    times += BLOCKS;
    block_meets();
    if (threadIdx.x == 0) count_up(met);
    work();
    if (threadIdx.x == 0) wait_for_count(met, times);
    block_meets();
}

// ---- the ring of weights ----------------------------------------------------------------------------

struct Ring {
    u32 chunks, full, empty;  // addresses in shared memory
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == SLOTS) at = 0, parity ^= 1;
    }
};

// All chunks that this multiprocessor needs, one after another.
struct Walk {
    int layers, layer = 0, phase = 0, unit = blockIdx.x, column = 0;

    __device__ __forceinline__ int row() const { return unit * (phase == TO_UP ? 4 : 8); }
    __device__ __forceinline__ void next() {
        column += COLUMNS;
        if (column < columns_of(phase)) return;
        column = 0, unit += BLOCKS;
        settle();
    }
    __device__ __forceinline__ void settle() {  // on a unit that is: a small product leaves some blocks none
        while (layer < layers && unit >= units_of(phase)) {
            unit = blockIdx.x;
            if (++phase == PHASES) phase = 0, layer++;
        }
    }
};

// Keeps the ring full. No more than FLYING copies are on their way: more would not come sooner, and what the other warps ask
// memory for would queue behind them.
__device__ __forceinline__ void deliver(Ring ring, const Maps *maps, int layers) {
    Walk walk{layers};
    walk.settle();
    for (int i = 0; walk.layer < layers; i++, walk.next(), ring.next()) {
        if (i == 0 || (walk.phase == TO_OUT && walk.column == 0))
            for (int j = 0; j < PHASES; j++) fetch_map(&maps[min(walk.layer + 1, layers - 1)].of[j]);
        const u32 full = ring.full + ring.at * 8;
        const int before = ring.at - FLYING;
        wait(ring.empty + ring.at * 8, ring.parity ^ 1);
        if (i >= FLYING) wait(ring.full + (before < 0 ? before + SLOTS : before) * 8, before < 0 ? ring.parity ^ 1 : ring.parity);
        arrive_and_expect<CHUNK>(full);
        copy(ring.chunks + ring.at * CHUNK, &maps[walk.layer].of[walk.phase], walk.row(), walk.column, full);
    }
}

// Norms and what describes the layers is little, and each would be waited for: all of it comes to the L2 cache at the start.
__device__ __forceinline__ void fetch_small(const Batch &t) {
    for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < t.num_layers; i += BLOCKS * WARPS)
        for (int at = threadIdx.x % 32; at < HIDDEN / 32; at += 32) {
            fetch(t.layers[i].norms[0] + at * 32);
            fetch(t.layers[i].norms[1] + at * 32);
            if (at < sizeof(Maps) / 128) fetch((const char *)(t.maps + i) + at * 128);
        }
}

// The product with x [ROWS, 64 columns] in shared memory: what each warp has summed up goes to `sums` [WARPS, units, ROWS, 8].
__device__ __forceinline__ void product(Ring &ring, int units, int columns, u32 x, u32 zeros, float *sums) {
    const int tid = thread();
    constexpr int EACH = COLUMNS / WARPS * 2;  // pieces of 32 inputs that a warp takes of a chunk
    const int warp = tid / 32, lane = tid % 32, line = lane % 8, part = lane / 8;
    float *to = sums + (warp * each(units, BLOCKS) * ROWS + lane / 4) * 8 + lane % 4 * 2;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += BLOCKS, to += ROWS * 8) {
        float c[4][4] = {};
#pragma unroll 1
        for (int first = 0; first < columns; first += COLUMNS) {
            const u32 chunk = ring.chunks + ring.at * CHUNK + line * 128;
            u32 a[EACH][4], b[EACH][4];
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int column = min(first + j / 2 * WARPS + warp, columns - 1);  // behind the end weights are zero
                load4(a[j], line < ROWS ? x + (column * ROWS + line) * 128 + ((j % 2 * 4 + part) ^ line) * 16 : zeros);
            }
            wait(ring.full + ring.at * 8, ring.parity);
#pragma unroll
            for (int j = 0; j < EACH; j++) load4(b[j], chunk + (j / 2 * WARPS + warp) * 1024 + ((j % 2 * 4 + part) ^ line) * 16);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                multiply(c[j % 2 * 2], a[j][0], a[j][1], b[j][0], b[j][1]);
                multiply(c[j % 2 * 2 + 1], a[j][2], a[j][3], b[j][2], b[j][3]);
            }
            __syncwarp();
            if (lane == 0) arrive(ring.empty + ring.at * 8);
            ring.next();
        }
        if (lane / 4 < ROWS)
            *(float2 *)to = make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0], c[0][1] + c[1][1] + c[2][1] + c[3][1]);
    }
    block_meets();
}

// What the warps have summed up, put together and put where it belongs.
__device__ __forceinline__ void finish(const Batch &t, const Layer &layer, int phase, const float *sums) {
    const int tid = thread();
    const int units = units_of(phase), mine = each(units, BLOCKS), wide_ = phase == TO_UP ? 4 : 8;
    const bf16 *bias = BIASES ? layer.biases[phase] : nullptr;
    for (int i = tid; i < mine * ROWS * wide_; i += THREADS) {
        const int place = i / wide_, unit = blockIdx.x + place / ROWS * BLOCKS, row = place % ROWS,
                  output = unit * wide_ + i % wide_;
        if (unit >= units) continue;
        const float *at = sums + place * 8 + i % wide_;
        bf16 *to = phase == TO_QKV  ? t.qkv + row * QKV + output
                   : phase == TO_UP ? t.inner + row * INTER + output
                                    : t.h + row * HIDDEN + output;
        const float before = phase % 2 ? fresh_one(to) : 0;
        float value = 0, up = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) value += at[w * mine * ROWS * 8];
        if (BIASES && bias) value += wide(bias[output]);
        if (phase == TO_UP) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) up += at[w * mine * ROWS * 8 + 4];
            if (BIASES && bias) up += wide(bias[INTER + output]);
            value = rounded(value), up = rounded(up);
            const float z = GELU ? 1.5957691216057308f * (value + 0.044715f * value * value * value) : value;
            value = value / (1 + exp2_(-1.4426950408889634f * z)) * up;
        }
        *to = narrow(value + before);
    }
}

// ---- x, into shared memory --------------------------------------------------------------------------

__device__ __forceinline__ char *place(char *x, int row, int eighth) {  // of eight neighbouring inputs
    return x + (eighth / 8 * ROWS + row) * 128 + ((eighth % 8) ^ (row % 8)) * 16;
}

__device__ __forceinline__ void take(char *x, const bf16 *from, int columns) {
    const int tid = turned(thread());
#pragma unroll 1
    for (int i = tid; i < columns * 8; i += THREADS) {
        uint4 v[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) v[row] = fresh(from + row * columns * 64 + i * 8);
#pragma unroll
        for (int row = 0; row < ROWS; row++) *(uint4 *)place(x, row, i) = v[row];
    }
    block_meets();
}

struct Norm {  // a thread's share of a norm's weights
    static constexpr int EIGHTHS = HIDDEN / 8, MINE = each(EIGHTHS, THREADS);
    float4 w[MINE][2];

    __device__ __forceinline__ void load(const float *weight) {
        const int tid = turned(thread());
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int i = min((int)tid + j * THREADS, EIGHTHS - 1);
            w[j][0] = ((const float4 *)weight)[2 * i], w[j][1] = ((const float4 *)weight)[2 * i + 1];
        }
    }
};

__device__ __forceinline__ float squares(u32 x) { return low(x) * low(x) + high(x) * high(x); }

__device__ __forceinline__ void take_normalised(char *x, const bf16 *h, const Norm &norm, float eps, float *scratch) {
    const int tid = turned(thread());
    constexpr int MINE = Norm::MINE, EIGHTHS = Norm::EIGHTHS;
    uint4 v[ROWS][MINE];
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int j = 0; j < MINE; j++)
            v[row][j] = tid + j * THREADS < EIGHTHS ? fresh(h + row * HIDDEN + (tid + j * THREADS) * 8) : make_uint4(0, 0, 0, 0);
    constexpr int N = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
    float sums[N] = {};
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int j = 0; j < MINE; j++)
            sums[row] += squares(v[row][j].x) + squares(v[row][j].y) + squares(v[row][j].z) + squares(v[row][j].w);
    sums_of_warp(sums);
    if (tid % (32 / N) == 0 && tid % 32 / (32 / N) < ROWS) scratch[tid % 32 / (32 / N) * WARPS + tid / 32] = sums[0];
    block_meets();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w += 4) {
            const float4 of = *(const float4 *)(scratch + row * WARPS + w);
            all += of.x + of.y + of.z + of.w;
        }
        const float f = rsqrtf(all / HIDDEN + eps);
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int i = tid + j * THREADS;
            if (i >= EIGHTHS) continue;
            const float4 a = norm.w[j][0], b = norm.w[j][1];
            const uint4 r = v[row][j];
            *(uint4 *)place(x, row, i) =
                make_uint4(pair(low(r.x) * f * a.x, high(r.x) * f * a.y), pair(low(r.y) * f * a.z, high(r.y) * f * a.w),
                           pair(low(r.z) * f * b.x, high(r.z) * f * b.y), pair(low(r.w) * f * b.z, high(r.w) * f * b.w));
        }
    }
    block_meets();
}

// ---- attention --------------------------------------------------------------------------------------

struct Unit {  // what a block attends to: some of a row's query heads, which share a key head, over positions begin .. end - 1
    int row, head, begin, end;  // head: the first query head
    bool newest;                // the last of them is this step's own
    const int *table;
    u64 slot;                            // where its own key goes
    int key_page, value_page;            // of the first tile: the block that Tile::load reads
    float cos[DIM / 64], sin[DIM / 64];  // of dimension lane + 32 i

    __device__ __forceinline__ Unit(const Batch &t, const Layer &layer, int i, int heads, int splits) {
        row = i / (HEADS / heads * splits), head = i / splits * heads % HEADS;
        const int length = t.lengths[row], first = layer.window ? max(0, length - (int)layer.window) : 0;
        const int part = each(length - first, splits);
        begin = min(first + i % splits * part, length), end = min(begin + part, length);
        newest = begin < end && end == length;
        table = t.table + t.rows[row] * t.s_table;
        slot = t.slots[row] / BLOCK * t.s_block + t.slots[row] % BLOCK * DIM;
        find(begin);
        const float *angles = layer.angles + t.positions[row] * DIM + threadIdx.x % 32;
        for (int j = 0; j < DIM / 64; j++) cos[j] = angles[32 * j], sin[j] = angles[DIM / 2 + 32 * j];
    }
    __device__ __forceinline__ void find(int first) {
        const int tid = thread();
        const int key = first + tid / 2, value = first + tid / 32 * 16 + tid % 16;
        key_page = key < end ? table[key / BLOCK] : 0, value_page = value < end ? table[value / BLOCK] : 0;
    }
};

// A tile's keys and values in registers. Two threads share a position's key; a warp has the values of 16 positions, some at a
// time, a lane eight dimensions of them.
struct Tile {
    static constexpr int LANES = DIM / 8, AT_ONCE = 32 / LANES;
    uint4 k[DIM / 16], v[16 / AT_ONCE];

    __device__ __forceinline__ void load(const Batch &t, const bf16 *kv, const Unit &unit, int first) {
        const int tid = thread();
        const int p = first + tid / 2;
        const bf16 *key = kv + unit.key_page * t.s_block + p % BLOCK * DIM + tid % 2 * (DIM / 2);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) k[i] = p < unit.end ? *(const uint4 *)(key + i * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; i++) {
            const u64 block = __shfl_sync(~0u, unit.value_page, place(tid, i));
            const int at = first + tid / 32 * 16 + place(tid, i);
            const bf16 *value = kv + t.s_kind + block * t.s_block + at % BLOCK * DIM + tid % LANES * 8;
            v[i] = at < unit.end ? *(const uint4 *)value : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ int place(int tid, int i) { return i * AT_ONCE + tid % 32 / LANES; }  // among the warp's 16
};

// One head's vector, normalised first where there is a norm, and rotated: a lane has dimensions lane + 32 i and those DIM / 2 on.
__device__ __forceinline__ void turn(const bf16 *from, const float *norm, const Unit &unit, float eps, float (&a)[DIM / 64],
                                     float (&b)[DIM / 64]) {
    const int tid = thread();
    const int lane = tid % 32;
    float squares = 0;
    for (int i = 0; i < DIM / 64; i++) {
        a[i] = fresh_one(from + lane + 32 * i), b[i] = fresh_one(from + DIM / 2 + lane + 32 * i);
        squares += a[i] * a[i] + b[i] * b[i];
    }
    if (QK_NORM) {
        const float factor = rsqrtf(sum_of_warp(squares) / DIM + eps);
        for (int i = 0; i < DIM / 64; i++) {
            a[i] = rounded(a[i] * factor * norm[lane + 32 * i]);
            b[i] = rounded(b[i] * factor * norm[DIM / 2 + lane + 32 * i]);
        }
    }
    for (int i = 0; i < DIM / 64; i++) {
        const float x = a[i], y = b[i];
        a[i] = x * unit.cos[i] - y * unit.sin[i], b[i] = y * unit.cos[i] + x * unit.sin[i];
    }
}

// `tile`, if loaded, is the unit's first, from before this step's own key and value existed: those are put in here, and into the
// cache.
template <int N>  // query heads
__device__ __forceinline__ void attend(const Batch &t, const Layer &layer, bf16 *kv, Unit &unit, Tile &tile, bool loaded,
                                       float *part, bool partial, float *scratch) {
    const int tid = thread();
    constexpr int HALF = DIM / 2 + 4;  // of a query; apart, so that two threads read both at once
    bf16 *own_k = (bf16 *)scratch, *own_v = own_k + DIM;
    float *q = scratch + DIM, *peak = q + N * 2 * HALF, *sum = peak + N, *shrink = sum + N, *score = peak + each(3 * N, 4) * 4;
    float *acc = score;  // comes after all scores
    const int warp = tid / 32, lane = tid % 32, half = tid % 2;
    const bf16 *mine = t.qkv + unit.row * QKV;
    const int key_head = unit.head / G;
    const bool writes = unit.newest && unit.head % G == 0;
    bf16 *to = kv + unit.slot;
    for (int i = warp; i < N + 2; i += WARPS) {
        if (i > N) {
            for (int d = lane; d < DIM; d += 32) {
                const bf16 v = narrow(fresh_one(mine + (HEADS + KV_HEADS + key_head) * DIM + d));
                own_v[d] = v;
                if (writes) to[t.s_kind + d] = v;
            }
            continue;
        }
        float a[DIM / 64], b[DIM / 64];
        turn(mine + (i < N ? unit.head + i : HEADS + key_head) * DIM, i < N ? layer.q_norm : layer.k_norm, unit, t.eps, a, b);
        for (int j = 0; j < DIM / 64; j++) {
            const int d = lane + 32 * j;
            if (i < N) q[i * 2 * HALF + d] = rounded(a[j]), q[(i * 2 + 1) * HALF + d] = rounded(b[j]);
            else {
                own_k[d] = narrow(a[j]), own_k[DIM / 2 + d] = narrow(b[j]);
                if (writes) to[d] = own_k[d], to[DIM / 2 + d] = own_k[DIM / 2 + d];
            }
        }
    }
    if (tid < N) peak[tid] = -INFINITY, sum[tid] = 0;
    float o[N][8];
#pragma unroll
    for (int g = 0; g < N; g++)
#pragma unroll
        for (int j = 0; j < 8; j++) o[g][j] = 0;
    block_meets();
#pragma unroll 1
    for (int first = unit.begin; first < unit.end; first += TILE) {
        const int p = first + tid / 2, last = unit.newest ? unit.end - 1 : -1;
        if (!loaded || first > unit.begin) unit.find(first), tile.load(t, kv, unit, first);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++)
            if (p == last) tile.k[i] = ((const uint4 *)own_k)[half * (DIM / 16) + i];
#pragma unroll
        for (int i = 0; i < 16 / Tile::AT_ONCE; i++)
            if (first + warp * 16 + Tile::place(tid, i) == last) tile.v[i] = ((const uint4 *)own_v)[lane % Tile::LANES];
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
        block_meets();
        for (int g = warp; g < N; g += WARPS) {
            float *row = score + g * TILE, x[TILE / 32], before = peak[g], top = before, all = 0;
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) x[i] = row[lane + 32 * i], top = fmaxf(top, x[i]);
            top = max_of_warp(top);
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) all += row[lane + 32 * i] = exp2_(x[i] - top);
            all = sum_of_warp(all);
            if (lane == 0) shrink[g] = exp2_(before - top), sum[g] = sum[g] * exp2_(before - top) + all, peak[g] = top;
        }
        block_meets();
#pragma unroll
        for (int g = 0; g < N; g++)
#pragma unroll
            for (int j = 0; j < 8; j++) o[g][j] *= shrink[g];
#pragma unroll
        for (int i = 0; i < 16 / Tile::AT_ONCE; i++) {
            const uint4 v = tile.v[i];
            const float f[8] = {low(v.x), high(v.x), low(v.y), high(v.y), low(v.z), high(v.z), low(v.w), high(v.w)};
#pragma unroll
            for (int g = 0; g < N; g++) {
                const float weight = score[g * TILE + warp * 16 + Tile::place(tid, i)];
#pragma unroll
                for (int j = 0; j < 8; j++) o[g][j] += weight * f[j];
            }
        }
        block_meets();
    }
#pragma unroll
    for (int g = 0; g < N; g++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = Tile::LANES; i < 32; i *= 2) o[g][j] += __shfl_xor_sync(~0u, o[g][j], i);
        if (lane < Tile::LANES) {
            float4 *to = (float4 *)(acc + (warp * N + g) * DIM + lane * 8);
            to[0] = make_float4(o[g][0], o[g][1], o[g][2], o[g][3]), to[1] = make_float4(o[g][4], o[g][5], o[g][6], o[g][7]);
        }
    }
    block_meets();
    for (int i = tid; i < N * DIM; i += THREADS) {
        float s = 0;
        for (int w = 0; w < WARPS; w++) s += acc[w * N * DIM + i];
        if (partial) part[i / DIM * (DIM + 2) + i % DIM] = s;
        else t.attended[unit.row * WIDTH + unit.head * DIM + i] = narrow(s / sum[i / DIM]);
    }
    if (partial && tid < N) part[tid * (DIM + 2) + DIM] = peak[tid], part[tid * (DIM + 2) + DIM + 1] = sum[tid];
}

// A head's parts, weighed by their peaks; a warp each.
__device__ __forceinline__ void join(const Batch &t, int splits) {
    const int tid = thread();
    const int lane = tid % 32;
    for (int i = blockIdx.x * WARPS + tid / 32; i < ROWS * HEADS; i += BLOCKS * WARPS) {
        const float *part = t.parts + (i / TOGETHER * splits * TOGETHER + i % TOGETHER) * (DIM + 2);
        float top = -INFINITY, all = 0, o[DIM / 32];
        for (int j = 0; j < DIM / 32; j++) o[j] = 0;
        for (int s = 0; s < splits; s++) top = fmaxf(top, fresh_float(part + s * TOGETHER * (DIM + 2) + DIM));
        for (int s = 0; s < splits; s++) {
            const float *p = part + s * TOGETHER * (DIM + 2);
            const float weight = exp2_(fresh_float(p + DIM) - top);
            all += weight * fresh_float(p + DIM + 1);
            for (int j = 0; j < DIM / 32; j++) o[j] += weight * fresh_float(p + lane + 32 * j);
        }
        for (int j = 0; j < DIM / 32; j++) t.attended[i * DIM + lane + 32 * j] = narrow(o[j] / all);
    }
}

// ---- the whole --------------------------------------------------------------------------------------

template <int PHASE>
__device__ __forceinline__ void multiply_all(const Batch &t, const Layer &layer, Ring &ring, char *x, u32 zeros, float *scratch) {
    product(ring, units_of(PHASE), columns_of(PHASE), shared(x), zeros, scratch);
    finish(t, layer, PHASE, scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) few(const __grid_constant__ Batch t) {
    SHARED_MEMORY(memory);
    char *x = memory + SLOTS * CHUNK;
    float *scratch = (float *)(x + ROWS * WIDEST * 2);
    u64 *barriers = (u64 *)((char *)scratch + SCRATCH);
    uint4 *nothing = (uint4 *)(barriers + 2 * SLOTS);
    Ring ring{shared(memory), shared(barriers), shared(barriers + SLOTS)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_begin(ring.full + i * 8, 1);
            barrier_begin(ring.empty + i * 8, WARPS);
        }
        barriers_begun();
        *nothing = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) deliver(ring, t.maps, t.num_layers);
        return;
    }
    fetch_small(t);
    const u32 zeros = shared(nothing);
    u32 times = 0;
    int longest = 0;
    for (int i = 0; i < ROWS; i++) longest = max(longest, t.lengths[i]);
    // Heads that share a key read it for themselves where contexts are short, and are done sooner.
    const bool apart = longest <= SHORT && ROWS * HEADS / FEWEST <= BLOCKS;
    const int heads = apart ? FEWEST : TOGETHER, groups = ROWS * HEADS / heads;
    const int splits = longest <= SHORT ? 1 : max(1, min(BLOCKS / groups, each(longest, TILE))), units = groups * splits;
    Norm norm;
    norm.load(t.layers->norms[0]);
    Unit unit(t, *t.layers, min((int)blockIdx.x, units - 1), heads, splits);
    Tile tile;
#pragma unroll 1
    for (int index = 0; index < t.num_layers; index++) {
        const Layer &layer = t.layers[index];
        bf16 *kv = t.kv + index * t.s_layer;

        take_normalised(x, t.h, norm, t.eps, scratch);
        multiply_all<TO_QKV>(t, layer, ring, x, zeros, scratch);
        all_meet(t.met, times, [&] {
            if (WINDOWS) unit = Unit(t, layer, min((int)blockIdx.x, units - 1), heads, splits);
            if (blockIdx.x < units) tile.load(t, kv + unit.head / G * t.s_head, unit, unit.begin);
        });

        for (int i = blockIdx.x; i < units; i += BLOCKS) {
            if (MANY_UNITS && i > blockIdx.x) {
                block_meets();
                unit = Unit(t, layer, i, heads, splits);
            }
            bf16 *of_head = kv + unit.head / G * t.s_head;
            if (apart) attend<FEWEST>(t, layer, of_head, unit, tile, i == blockIdx.x, nullptr, false, scratch);
            else
                attend<TOGETHER>(t, layer, of_head, unit, tile, i == blockIdx.x, t.parts + i * TOGETHER * (DIM + 2), splits > 1,
                                 scratch);
        }
        if (MANY_UNITS && units > BLOCKS) unit = Unit(t, layer, blockIdx.x, heads, splits);
        else if (unit.end - unit.begin > TILE) unit.find(unit.begin);
        all_meet(t.met, times, [] {});
        if (splits > 1) {
            join(t, splits);
            all_meet(t.met, times, [] {});
        }

        take(x, t.attended, WIDTH / 64);
        multiply_all<TO_OUT>(t, layer, ring, x, zeros, scratch);
        all_meet(t.met, times, [&] { norm.load(layer.norms[1]); });

        take_normalised(x, t.h, norm, t.eps, scratch);
        multiply_all<TO_UP>(t, layer, ring, x, zeros, scratch);
        all_meet(t.met, times, [] {});

        take(x, t.inner, INTER / 64);
        multiply_all<TO_DOWN>(t, layer, ring, x, zeros, scratch);
        all_meet(t.met, times, [&] { norm.load(index + 1 < t.num_layers ? t.layers[index + 1].norms[0] : t.norm); });
    }
    if (blockIdx.x < ROWS) {  // the last norm: a row each
        take_normalised(x, t.h, norm, t.eps, scratch);
        for (int i = threadIdx.x; i < HIDDEN / 8; i += THREADS)
            ((uint4 *)(t.h + blockIdx.x * HIDDEN))[i] = *(uint4 *)place(x, blockIdx.x, i);
    }
}
