// All layers of a decoder for a few rows, one token each, in one launch. Read decode_megakernel.py first.
//
// One block of threads a multiprocessor, all alive from the first layer to the last. In each:
//
//     warp 8       asks for weights, in the order in which they will be needed, and waits only for room in the ring and for the
//                  copies before: while arithmetic waits for what other multiprocessors are still computing, memory delivers
//     warps 0..7   multiply, normalise, attend. They meet those of all other multiprocessors (all_meet) five times a layer, six
//                  times where contexts are split
//
//     qkv      its outputs of W_qkv norm(h)
//     attend   rotate, write K and V, attend: a (row, key head, part of the context) each
//     out      its outputs of h += W_out a
//     up       its outputs of act(W_gate norm(h)) * (W_up norm(h))
//     down     its outputs of h += W_down y
//
// and after the last layer, where the model's vocabulary allows it, its outputs of logits = W_head norm(h).
//
// Norms. norm(h) = f h w, of which f is a number for each row: W (f h w) = f W (h w). Whoever owns outputs of h keeps them in
// registers, and tells the others h w and its part of the sum of squares. They multiply with h w as it comes, and what comes out
// with f, which they need only then: between two products stands nothing but a copy of x.
//
// Products. A unit is eight outputs (or four of gate and four of up), which come as chunks [16][8][64]: of 16 times 64 inputs.
// Tensor cores multiply [16 rows of x, of which ROWS exist] with [8 outputs]: each warp takes two of a chunk's 16 columns, and
// what the warps have summed up is added at the end of the phase. 16-byte parts of a line of 128 bytes are stored exchanged
// (part ^ line % 8), which is how copies of that kind write them, so that eight lines are read without waiting for each other.
//
// Constants come from decode_megakernel.py: WARPS (that compute), ROWS, HIDDEN, INTER, HEADS, KV_HEADS, DIM, BLOCK (positions a block of KV),
// BLOCKS (of threads), SLOTS (chunks the ring holds), SHARED (bytes), PARTS (in which x comes to W_down: there it is largest, and
// what it takes the ring lacks), FLYING and MEETING (deliver), TOGETHER (heads), and what the model has:
// VOCAB (logits; 0: they are computed elsewhere), GELU, QK_NORM, WINDOWS, BIASES.

#include "hopper.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int G = HEADS / KV_HEADS, WIDTH = HEADS * DIM, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int COLUMNS = 16, CHUNK = COLUMNS * 8 * 128;  // columns of 64 inputs, bytes
constexpr int TILE = THREADS / 2, SHORT = 256;  // positions that are attended to at once, and of a context that is not split

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int each(int all, int parts) { return (all + parts - 1) / parts; }

// The four products of a layer, and the head's.
enum Phase { TO_QKV, TO_OUT, TO_UP, TO_DOWN, PHASES, TO_HEAD = PHASES };
__device__ constexpr int units_of(int p) {
    return (p == TO_QKV ? QKV : p == TO_UP ? 2 * INTER : p == TO_HEAD ? VOCAB : HIDDEN) / 8;
}
__device__ constexpr int columns_of(int p) { return (p == TO_OUT ? WIDTH : p == TO_DOWN ? INTER : HIDDEN) / 64; }
// W_down is multiplied in two passes, the second of columns FOLD and on; always, so that rows get the same bits in any company.
constexpr int INNER = columns_of(TO_DOWN), TWO_THIRDS = each(2 * each(INNER, COLUMNS), 3) * COLUMNS;
constexpr int FOLD = TWO_THIRDS < INNER ? TWO_THIRDS : INNER;
// Units of a block whose sums are kept until they are put where they belong: all of them, but of the head's as many as of W_up's.
__device__ constexpr int kept_of(int p) { return each(units_of(p == TO_HEAD ? (int)TO_UP : p), BLOCKS); }

// How many heads a block attends to: as few as there are blocks for.
__device__ constexpr int fewest(int n) {
    return n < TOGETHER && TOGETHER % (2 * n) == 0 && ROWS * HEADS / n > BLOCKS ? fewest(2 * n) : n;
}
constexpr int FEWEST = fewest(1);                              // where contexts are short; else TOGETHER
constexpr bool MANY_UNITS = ROWS * HEADS / TOGETHER > BLOCKS;  // a block may have several
constexpr int SCORES = DIM + TOGETHER * (DIM + 8) + most(TOGETHER * TILE, WARPS * TOGETHER * DIM) + 3 * TOGETHER + 4;
// Bytes of x and, behind it, of what the warps have summed up; or of what attend() keeps.
__device__ constexpr int x_of(int p) { return ROWS * (p == TO_DOWN && PARTS == 2 ? FOLD : columns_of(p)) * 128; }
__device__ constexpr int bytes_of(int p) { return x_of(p) + WARPS * kept_of(p) * ROWS * 8 * 4; }
constexpr int PRODUCTS = most(most(bytes_of(TO_QKV), bytes_of(TO_OUT)), most(bytes_of(TO_UP), bytes_of(TO_DOWN)));
constexpr int PLACE = each(most(PRODUCTS, SCORES * 4), 128) * 128;
static_assert(SLOTS * CHUNK + PLACE + SLOTS * 16 + 16 + ROWS * WARPS * 4 + 4 <= SHARED, "decode_megakernel.py: room()");

struct Layer {
    const float *norms[2], *q_norm, *k_norm, *angles;  // of attention and of the MLP
    const bf16 *biases[PHASES];
    u64 window;
};
struct Maps {  // of a layer's matrices, as TMA sees them
    Map of[PHASES];
};

struct Batch {  // what decode_megakernel.py passes
    const Layer *layers;
    const Maps *maps;
    const Map *head;
    const float *norm;
    const bf16 *h;   // [ROWS, HIDDEN]: embeddings
    bf16 *weighed;   // [ROWS, HIDDEN]: h times the weights of the norm that comes next
    float *squares;  // [ROWS, HIDDEN / 8]: of h, eight summed up
    bf16 *last;      // [ROWS, HIDDEN]: h after the last norm
    bf16 *logits;    // [ROWS, VOCAB]
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
struct Meeting {
    u32 *met, times;
    volatile int *on;  // for the block's other warp

    template <class Work>
    __device__ __forceinline__ void operator()(Work work) {
        times += BLOCKS;
        block_meets();
        if (threadIdx.x == 0) *on = 1, count_up(met);
        work();
        if (threadIdx.x == 0) {
            wait_for_count(met, times);
            *on = 0;
        }
        block_meets();
    }
};

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
    int layers, layer = 0, phase = 0, unit = blockIdx.x, begin = 0, column = 0;  // begin: the column that this pass begins with

    __device__ __forceinline__ int row() const { return unit * (phase == TO_UP ? 4 : 8); }
    __device__ __forceinline__ bool again() const { return phase == TO_DOWN && begin == 0 && FOLD < INNER; }  // a pass more
    __device__ __forceinline__ void next() {
        column += COLUMNS;
        if (column < (again() ? FOLD : columns_of(phase))) return;
        column = begin, unit += BLOCKS;
        settle();
    }
    __device__ __forceinline__ void settle() {  // on a unit that is: a small product leaves some blocks none
        while (!over() && unit >= units_of(phase)) {
            unit = blockIdx.x, column = begin = again() ? FOLD : 0;
            if (begin == 0 && ++phase >= PHASES) layer++, phase = layer == layers ? (int)TO_HEAD : 0;
        }
    }
    __device__ __forceinline__ bool over() const { return layer == layers + (VOCAB > 0); }
};

// Keeps the ring full. No more than FLYING copies are on their way: more would not come sooner, and what the other warps ask
// memory for would queue behind them; so while they meet those of other blocks, no more than MEETING.
__device__ __forceinline__ void deliver(Ring ring, const Maps *maps, const Map *head, int layers, volatile int *meeting) {
    Walk walk{layers};
    walk.settle();
    if (VOCAB) fetch_map(head);
    for (int i = 0; !walk.over(); i++, walk.next(), ring.next()) {
        if (i == 0 || (walk.phase == TO_OUT && walk.column == 0))
            for (int j = 0; j < PHASES; j++) fetch_map(&maps[min(walk.layer + 1, layers - 1)].of[j]);
        const u32 full = ring.full + ring.at * 8;
        const int flying = FLYING > MEETING && *meeting ? MEETING : FLYING, before = ring.at - flying;
        wait(ring.empty + ring.at * 8, ring.parity ^ 1);
        if (i >= flying) wait(ring.full + (before < 0 ? before + SLOTS : before) * 8, before < 0 ? ring.parity ^ 1 : ring.parity);
        arrive_and_expect<CHUNK>(full);
        const Map *map = walk.phase == TO_HEAD ? head : &maps[walk.layer].of[walk.phase];
        copy(ring.chunks + ring.at * CHUNK, map, walk.row(), walk.column, full);
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

// The product with columns BEGIN .. END - 1 of x, which are in shared memory, of units first .. end - 1 of which each block has
// every BLOCKS-th, `kept` at most: what each warp has summed up goes to `sums` [WARPS, kept, ROWS, 8]; a second pass adds to it.
template <int BEGIN, int END>
__device__ __forceinline__ void product(Ring &ring, int first_unit, int end, int kept, u32 x, u32 zeros, float *sums) {
    const int tid = thread();
    constexpr int EACH = COLUMNS / WARPS * 2;  // pieces of 32 inputs that a warp takes of a chunk
    const int warp = tid / 32, lane = tid % 32, line = lane % 8, part = lane / 8;
    float *to = sums + (warp * kept * ROWS + lane / 4) * 8 + lane % 4 * 2;
#pragma unroll 1
    for (int unit = first_unit + blockIdx.x; unit < end; unit += BLOCKS, to += ROWS * 8) {
        float c[4][4] = {};
#pragma unroll 1
        for (int first = 0; first < END - BEGIN; first += COLUMNS) {
            const u32 chunk = ring.chunks + ring.at * CHUNK + line * 128;
            u32 a[EACH][4], b[EACH][4];
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int column = min(first + j / 2 * WARPS + warp, END - BEGIN - 1);  // behind the end weights are zero
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
        if (lane / 4 >= ROWS) continue;
        float2 sum = make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0], c[0][1] + c[1][1] + c[2][1] + c[3][1]);
        if (BEGIN) sum.x += to[0], sum.y += to[1];
        *(float2 *)to = sum;
    }
}

// What the warps have summed up, put together.
__device__ __forceinline__ float added(const float *sums, int stride) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += sums[w * stride];
    return value;
}

// ---- h, and its norms -------------------------------------------------------------------------------

// A thread's share of h: the same outputs of W_out and of W_down.
struct Own {
    static constexpr int PLACES = kept_of(TO_OUT) * ROWS * 8, MINE = each(PLACES, THREADS);
    float h[MINE], w[MINE];  // and the next norm's weights

    template <class Work>
    static __device__ __forceinline__ void each_of(Work work) {  // work(j, place among the sums, is it there, unit, row, output)
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int i = thread() + j * THREADS, unit = blockIdx.x + i / 8 / ROWS * BLOCKS;
            work(j, i, i < PLACES && unit < units_of(TO_OUT), unit, i / 8 % ROWS, unit * 8 + i % 8);
        }
    }
    __device__ __forceinline__ void begin(const bf16 *from) {
        each_of([&](int j, int, bool is, int, int row, int output) { h[j] = is ? wide(from[row * HIDDEN + output]) : 0; });
    }
    __device__ __forceinline__ void norm(const float *weight) {
        each_of([&](int j, int, bool is, int, int, int output) { w[j] = is ? weight[output] : 0; });
    }
    __device__ __forceinline__ void add(const float *sums, const bf16 *bias) {
        each_of([&](int j, int place, bool is, int, int, int output) {
            if (!is) return;
            float value = added(sums + place, PLACES);
            if (BIASES && bias) value += wide(bias[output]);
            h[j] = rounded(h[j] + value);
        });
    }
    __device__ __forceinline__ void tell(const Batch &t) const {
        each_of([&](int j, int, bool is, int unit, int row, int output) {
            float square = h[j] * h[j];
            for (int i = 4; i; i /= 2) square += __shfl_xor_sync(~0u, square, i);
            if (!is) return;
            t.weighed[row * HIDDEN + output] = narrow(h[j] * w[j]);
            if (output % 8 == 0) t.squares[row * (HIDDEN / 8) + unit] = square;
        });
    }
};

// f of each row: a thread's share of the squares, which add up while the others multiply.
struct Factors {
    static constexpr int N = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS, UNITS = HIDDEN / 8, MINE = each(UNITS, THREADS);
    float part[MINE][ROWS];

    __device__ __forceinline__ void load(const float *squares) {
        const int tid = turned(thread());
#pragma unroll
        for (int j = 0; j < MINE; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const int i = tid + j * THREADS;
                part[j][row] = i < UNITS ? fresh_float(squares + row * UNITS + i) : 0;
            }
    }
    __device__ __forceinline__ void share(float *shares) const {  // [ROWS, WARPS]
        const int tid = turned(thread());
        float sums[N] = {};
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int j = 0; j < MINE; j++) sums[row] += part[j][row];
        sums_of_warp(sums);
        if (tid % (32 / N) == 0 && tid % 32 / (32 / N) < ROWS) shares[tid % 32 / (32 / N) * WARPS + tid / 32] = sums[0];
    }
    static __device__ __forceinline__ float of(const float *shares, int row, float eps) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w += 4) {
            const float4 four = *(const float4 *)(shares + row * WARPS + w);
            all += four.x + four.y + four.z + four.w;
        }
        return rsqrtf(all / HIDDEN + eps);
    }
};

// Of a product with h w, from unit `first` on: put where it belongs.
template <int PHASE>
__device__ __forceinline__ void finish(const Batch &t, const Layer *layer, int first, int end, const float *sums,
                                       const float *shares) {
    const int tid = thread();
    constexpr int WIDE = PHASE == TO_UP ? 4 : 8, STRIDE = kept_of(PHASE) * ROWS * 8;
    const bf16 *bias = BIASES && PHASE != TO_HEAD ? layer->biases[PHASE] : nullptr;
    for (int i = tid; i < kept_of(PHASE) * ROWS * WIDE; i += THREADS) {
        const int place = i / WIDE, unit = first + blockIdx.x + place / ROWS * BLOCKS, row = place % ROWS,
                  output = unit * WIDE + i % WIDE;
        if (unit >= end) continue;
        const float *at = sums + place * 8 + i % WIDE, f = Factors::of(shares, row, t.eps);
        float value = added(at, STRIDE) * f;
        if (BIASES && bias) value += wide(bias[output]);
        if (PHASE == TO_UP) {
            float up = added(at + 4, STRIDE) * f;
            if (BIASES && bias) up += wide(bias[INTER + output]);
            value = rounded(value), up = rounded(up);
            const float z = GELU ? 1.5957691216057308f * (value + 0.044715f * value * value * value) : value;
            value = value / (1 + exp2_(-1.4426950408889634f * z)) * up;
        }
        bf16 *to = PHASE == TO_QKV  ? t.qkv + row * QKV
                   : PHASE == TO_UP ? t.inner + row * INTER
                                    : t.logits + (u64)row * VOCAB;
        to[output] = narrow(value);
    }
}

// ---- x, into shared memory --------------------------------------------------------------------------

__device__ __forceinline__ char *place(char *x, int row, int eighth) {  // of eight neighbouring inputs
    return x + (eighth / 8 * ROWS + row) * 128 + ((eighth % 8) ^ (row % 8)) * 16;
}

// Columns BEGIN .. END - 1 of ALL.
template <int ALL, int BEGIN, int END>
__device__ __forceinline__ void take(char *x, const bf16 *from) {
    const int tid = turned(thread());
#pragma unroll 2
    for (int i = tid; i < (END - BEGIN) * 8; i += THREADS) {
        uint4 v[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; row++) v[row] = fresh(from + row * ALL * 64 + BEGIN * 64 + i * 8);
#pragma unroll
        for (int row = 0; row < ROWS; row++) *(uint4 *)place(x, row, i) = v[row];
    }
    block_meets();
}

// The same in two steps: what others wrote comes to registers while something else is multiplied, and then takes its place.
template <int ALL, int BEGIN, int END>
struct Later {
    static constexpr int N = each((END - BEGIN) * 8, THREADS);
    uint4 v[N][ROWS];

    __device__ __forceinline__ void load(const bf16 *from) {
        const int tid = turned(thread());
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const int i = min(tid + j * THREADS, (END - BEGIN) * 8 - 1);
                v[j][row] = fresh(from + row * ALL * 64 + BEGIN * 64 + i * 8);
            }
    }
    __device__ __forceinline__ void store(char *x) const {
        const int tid = turned(thread());
        block_meets();  // what is there was used
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                if (tid + j * THREADS < (END - BEGIN) * 8) *(uint4 *)place(x, row, tid + j * THREADS) = v[j][row];
        block_meets();
    }
};

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

// A product with h w.
template <int PHASE>
__device__ __forceinline__ void multiply_normalised(const Batch &t, const Layer *layer, Ring &ring, char *x, u32 zeros,
                                                    float *shares) {
    constexpr int AT_ONCE = kept_of(PHASE) * BLOCKS;  // units of all blocks
    float *sums = (float *)(x + x_of(PHASE));
    Factors factors;
    take<HIDDEN / 64, 0, HIDDEN / 64>(x, t.weighed);
    factors.load(t.squares);  // after x, which is waited for; these come while it is multiplied
#pragma unroll 1
    for (int first = 0; first < units_of(PHASE); first += AT_ONCE) {
        const int end = min(first + AT_ONCE, units_of(PHASE));
        if (first) block_meets();  // what was summed up has been read
        product<0, HIDDEN / 64>(ring, first, end, kept_of(PHASE), shared(x), zeros, sums);
        if (first == 0) factors.share(shares);
        block_meets();
        finish<PHASE>(t, layer, first, end, sums, shares);
    }
}

// A product that is added to h; in two passes where FIRST columns are not ALL.
template <int PHASE, int FIRST, int ALL>
__device__ __forceinline__ void multiply_and_add(const Batch &t, const Layer &layer, Ring &ring, char *x, u32 zeros, Own &own) {
    constexpr bool APART = FIRST < ALL && PARTS == 2;
    const bf16 *from = PHASE == TO_OUT ? t.attended : t.inner;
    float *sums = (float *)(x + x_of(PHASE));
    take<ALL, 0, APART ? FIRST : ALL>(x, from);
    if constexpr (FIRST < ALL) {
        Later<ALL, FIRST, ALL> rest;
        if constexpr (APART) rest.load(from);
        product<0, FIRST>(ring, 0, units_of(PHASE), kept_of(PHASE), shared(x), zeros, sums);
        if constexpr (APART) rest.store(x);
        product<FIRST, ALL>(ring, 0, units_of(PHASE), kept_of(PHASE), shared(x) + (APART ? 0 : FIRST * ROWS * 128), zeros, sums);
    } else product<0, ALL>(ring, 0, units_of(PHASE), kept_of(PHASE), shared(x), zeros, sums);
    block_meets();
    own.add(sums, BIASES ? layer.biases[PHASE] : nullptr);
    own.tell(t);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_megakernel(const __grid_constant__ Batch t) {
    SHARED_MEMORY(memory);
    char *x = memory + SLOTS * CHUNK;
    float *scratch = (float *)x;  // attend's
    u64 *barriers = (u64 *)(x + PLACE);
    uint4 *nothing = (uint4 *)(barriers + 2 * SLOTS);
    float *shares = (float *)(nothing + 1);
    volatile int *meeting = (int *)(shares + ROWS * WARPS);
    Ring ring{shared(memory), shared(barriers), shared(barriers + SLOTS)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_begin(ring.full + i * 8, 1);
            barrier_begin(ring.empty + i * 8, WARPS);
        }
        barriers_begun();
        *nothing = make_uint4(0, 0, 0, 0), *meeting = 0;
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) deliver(ring, t.maps, t.head, t.num_layers, meeting);
        return;
    }
    fetch_small(t);
    const u32 zeros = shared(nothing);
    Meeting all_meet{t.met, 0, meeting};
    int longest = 0;
    for (int i = 0; i < ROWS; i++) longest = max(longest, t.lengths[i]);
    // Heads that share a key read it for themselves where contexts are short, and are done sooner.
    const bool apart = longest <= SHORT && ROWS * HEADS / FEWEST <= BLOCKS;
    const int heads = apart ? FEWEST : TOGETHER, groups = ROWS * HEADS / heads;
    const int splits = longest <= SHORT ? 1 : max(1, min(BLOCKS / groups, each(longest, TILE))), units = groups * splits;
    Own own;
    own.begin(t.h);
    own.norm(t.layers->norms[0]);
    own.tell(t);
    Unit unit(t, *t.layers, min((int)blockIdx.x, units - 1), heads, splits);
    Tile tile;
    all_meet([] {});
#pragma unroll 1
    for (int index = 0; index < t.num_layers; index++) {
        const Layer &layer = t.layers[index];
        bf16 *kv = t.kv + index * t.s_layer;

        multiply_normalised<TO_QKV>(t, &layer, ring, x, zeros, shares);
        all_meet([&] {
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
        all_meet([&] { own.norm(layer.norms[1]); });
        if (splits > 1) {
            join(t, splits);
            all_meet([] {});
        }
        multiply_and_add<TO_OUT, WIDTH / 64, WIDTH / 64>(t, layer, ring, x, zeros, own);
        all_meet([] {});

        multiply_normalised<TO_UP>(t, &layer, ring, x, zeros, shares);
        all_meet([&] { own.norm(index + 1 < t.num_layers ? t.layers[index + 1].norms[0] : t.norm); });

        multiply_and_add<TO_DOWN, FOLD, INNER>(t, layer, ring, x, zeros, own);
        all_meet([] {});
    }
    if (VOCAB) multiply_normalised<TO_HEAD>(t, nullptr, ring, x, zeros, shares);
    else {
        Factors factors;
        factors.load(t.squares);
        factors.share(shares);
        block_meets();
    }
    Own::each_of([&](int j, int, bool is, int, int row, int output) {
        if (is) t.last[row * HIDDEN + output] = narrow(own.h[j] * Factors::of(shares, row, t.eps) * own.w[j]);
    });
}
