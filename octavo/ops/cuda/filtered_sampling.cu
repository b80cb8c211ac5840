// Samples one token per row from the likeliest tokens only: those that min-p, top-k and top-p keep.
// One thread block per row. Nothing is sorted.
//
// Each token has a key: its distance from the largest logit in logit units (octavo/ops/__init__.py),
// and the token itself in the low bits. Smaller keys are likelier, and equal logits rank by token.
// The kept tokens are those with a key up to a cut. The cut of top-k is the key of the k-th token.
// The cut of top-p is the key at which the probabilities, added in the order of keys, reach p.
//
// A cut is found with histograms. The first one divides all keys into 2,048 bins. The bin that holds
// the cut is divided into 2,048 bins again, until it holds one token:
//
//     keys     |----|----|----|----|----|----|        sums up to each bin:  12  40  97 ...
//                        `-- the k-th token is here   |--|--|--|--|--|--|
//                                                              `-- and here
//
// As soon as all tokens up to the bin fit, they are copied to a list in shared memory, and the row
// is not read again. Probabilities are added as integers, so the result does not depend on the order
// in which threads add them.
//
// Constants: THREADS, LIST (keys in the list), STORAGE (of logits: 0 float32, 1 bfloat16, 2 float16),
// ALIGNED (rows of logits begin at multiples of 16 bytes).

#include "hopper.cuh"

constexpr int BIN_BITS = 11;
constexpr int BINS = 1 << BIN_BITS;
constexpr int TOKEN_BITS = 20;
constexpr int KEY_BITS = 51;
constexpr u64 NO_KEY = ~0ull;
constexpr float MAX_LOGIT_UNITS = 2147483520.0f;  // the largest float below 2^31
constexpr float LOGIT_UNIT = 1.0f / 67108864;     // 2^-26, as a part of the temperature
constexpr int VECTOR = 8;                         // logits that a thread loads at once
constexpr bool FLOAT32 = STORAGE == 0;
constexpr int LOGIT_BYTES = FLOAT32 ? 4 : 2;

struct Arguments {
    const void *logits;
    u64 stride_logits;
    const int *slots;      // the batch slot of each row
    const int *positions;  // the position of each row's new token
    const float *temperature, *top_p;
    const int *top_k, *max_distance, *seed_low, *seed_high;
    u64 stride_float, stride_int;
    int *tokens;  // the likeliest token of each row, or -1; the sampled token afterwards
    int vocab_size;
};

struct Sum {
    u64 mass;  // of probabilities, relative to the likeliest token's, in units of 2^-40
    u32 count;
};

struct Shared {
    u32 counts[BINS], mass_low[BINS], mass_high[BINS];  // of the histogram
    Sum sums[2][THREADS];                               // of the prefix sum
    float scores[THREADS];
    int tokens[THREADS];
    u64 list[LIST];
    u32 list_size;
    // The bin that holds the cut, the sum of all bins before it, and its number of tokens.
    u32 bin, bin_count;
    Sum before;
};

// ---- keys ---------------------------------------------------------------------------------------

__device__ __forceinline__ u64 key_of(float distance, float units_per_logit, int token) {
    const float units = fminf(distance * units_per_logit, MAX_LOGIT_UNITS);
    return (u64)(u32)units << TOKEN_BITS | (u32)token;
}
__device__ __forceinline__ int token_of(u64 key) { return (int)(key & ((1u << TOKEN_BITS) - 1)); }
__device__ __forceinline__ u64 mass_of(u64 key) {
    const float units = (float)(u32)(key >> TOKEN_BITS);
    return (u64)(exp2_(units * (-1.44269504f * LOGIT_UNIT)) * 1099511627776.0f);
}

struct Row {
    const char *logits;
    int vocab_size;
    float largest, units_per_logit;
    bool is_listed;  // the tokens that may still be kept are in Shared::list

    static __device__ __forceinline__ float as_float(u32 bits) {
        return STORAGE == 2 ? half_to_float(bits) : low(bits);
    }
    __device__ __forceinline__ float logit(int token) const {
        if (FLOAT32) return ((const float *)logits)[token];
        return as_float(((const unsigned short *)logits)[token]);
    }

    __device__ __forceinline__ void load(float (&values)[VECTOR], int first) const {
        if (ALIGNED && first + VECTOR <= vocab_size) {
            const uint4 *vectors = (const uint4 *)(logits + (u64)first * LOGIT_BYTES);
            const uint4 v = vectors[0];
            if (FLOAT32) {
                const uint4 w = vectors[1];
                const u32 words[VECTOR] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
                for (int i = 0; i < VECTOR; i++) values[i] = __uint_as_float(words[i]);
            } else {
                const u32 words[VECTOR / 2] = {v.x, v.y, v.z, v.w};
                for (int i = 0; i < VECTOR; i++)
                    values[i] = as_float(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
            }
        } else {
            for (int i = 0; i < VECTOR; i++)
                values[i] = first + i < vocab_size ? logit(first + i) : 0.0f;
        }
    }

    // Calls visit(key) for each token of the row or of the list, with all threads.
    template <class Visit>
    __device__ __forceinline__ void for_each(const Shared &memory, Visit visit) const {
        if (is_listed) {
            for (u32 i = thread(); i < memory.list_size; i += THREADS) visit(memory.list[i]);
            return;
        }
        for (int first = thread() * VECTOR; first < vocab_size; first += THREADS * VECTOR) {
            float values[VECTOR];
            load(values, first);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (first + i < vocab_size)
                    visit(key_of(largest - values[i], units_per_logit, first + i));
        }
    }
};

// ---- histograms ---------------------------------------------------------------------------------

// Counts the tokens with keys first..last in bins of 2^shift keys. Adds their mass if `with_mass`.
__device__ __forceinline__ void fill_histogram(const Row &row, Shared &memory, u64 first, u64 last,
                                               int shift, bool with_mass) {
    for (int bin = thread(); bin < BINS; bin += THREADS)
        memory.counts[bin] = memory.mass_low[bin] = memory.mass_high[bin] = 0;
    __syncthreads();
    row.for_each(memory, [&](u64 key) {
        if (key < first || key > last) return;
        const u32 bin = (u32)((key - first) >> shift);
        atomicAdd(&memory.counts[bin], 1u);
        if (!with_mass) return;
        const u64 mass = mass_of(key);
        const u32 low_part = (u32)mass;
        const u32 old = atomicAdd(&memory.mass_low[bin], low_part);
        const u32 high_part = (u32)(mass >> 32) + (old + low_part < old);
        if (high_part) atomicAdd(&memory.mass_high[bin], high_part);
    });
    __syncthreads();
}

__device__ __forceinline__ Sum bin_sum(const Shared &memory, int bin) {
    return {(u64)memory.mass_high[bin] << 32 | memory.mass_low[bin], memory.counts[bin]};
}
__device__ __forceinline__ Sum plus(Sum a, Sum b) { return {a.mass + b.mass, a.count + b.count}; }

// Returns the sum of all bins before those of this thread, and the sum of all bins in `total`.
__device__ __forceinline__ Sum sum_before(Shared &memory, Sum &total) {
    constexpr int MINE = BINS / THREADS;
    Sum mine = {0, 0};
    for (int i = 0; i < MINE; i++) mine = plus(mine, bin_sum(memory, thread() * MINE + i));
    int from = 0;
    memory.sums[0][thread()] = mine;
    __syncthreads();
    for (int distance = 1; distance < THREADS; distance *= 2) {
        Sum sum = memory.sums[from][thread()];
        if (thread() >= distance) sum = plus(sum, memory.sums[from][thread() - distance]);
        from ^= 1;
        memory.sums[from][thread()] = sum;
        __syncthreads();
    }
    total = memory.sums[from][THREADS - 1];
    const Sum through = memory.sums[from][thread()];
    return {through.mass - mine.mass, through.count - mine.count};
}

// ---- cuts ---------------------------------------------------------------------------------------

// Copies the keys up to `last` to the list.
__device__ __forceinline__ void collect(Row &row, Shared &memory, u64 last) {
    if (thread() == 0) memory.list_size = 0;
    __syncthreads();
    row.for_each(memory, [&](u64 key) {
        if (key <= last) memory.list[atomicAdd(&memory.list_size, 1u)] = key;
    });
    __syncthreads();
    row.is_listed = true;
}

// Returns the cut among the keys up to `last`. With `top_k`, it is the key of the top_k-th token, or
// `last` if there are fewer tokens. Otherwise it is the key at which the mass reaches top_p of all.
__device__ __forceinline__ u64 find_cut(Row &row, Shared &memory, u64 last, u32 top_k, float top_p) {
    constexpr int MINE = BINS / THREADS;
    u64 first = 0, target = top_k;
    Sum before = {0, 0};
    for (int shift = KEY_BITS - BIN_BITS;; shift = max(shift - BIN_BITS, 0)) {
        fill_histogram(row, memory, first, last, shift, !top_k);
        Sum total;
        Sum sum = sum_before(memory, total);
        if (!target) {
            target = (u64)((double)top_p * (double)total.mass);
            if (!target) target = 1;
        }
        if (top_k && before.count + total.count < target) return last;
        for (int i = 0; i < MINE; i++) {
            const int bin = thread() * MINE + i;
            const Sum start = plus(before, sum);
            sum = plus(sum, bin_sum(memory, bin));
            const Sum end = plus(before, sum);
            const bool is_here = top_k ? start.count < target && end.count >= target
                                       : start.mass < target && end.mass >= target;
            if (is_here) {
                memory.bin = bin;
                memory.bin_count = memory.counts[bin];
                memory.before = start;
            }
        }
        __syncthreads();
        before = memory.before;
        const u32 bin_count = memory.bin_count;
        first += (u64)memory.bin << shift;
        const u64 bin_last = first + (1ull << shift) - 1;
        last = bin_last < last ? bin_last : last;
        __syncthreads();
        if (!row.is_listed && before.count + bin_count <= LIST) collect(row, memory, last);
        if (bin_count == 1 || !shift) return last;
    }
}

// ---- the choice ---------------------------------------------------------------------------------

__device__ __forceinline__ u32 mix(u32 bits) {
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}

// Gumbel noise of a token, as in sampling_kernels.py.
__device__ __forceinline__ float noise(u32 noise_key, int token) {
    const u32 bits = mix(mix((u32)token) ^ noise_key);
    const float uniform =
        fminf((float)bits * 2.3283064365386963e-10f + 1.1641532182693481e-10f, 0.99999994f);
    const float log1p = uniform < 1e-3f
                            ? -uniform * (1.0f + uniform * (0.5f + uniform * 0.33333334f))
                            : log_(1.0f - uniform);
    return -log_(-log1p);
}

// Returns the token with the best score among the keys up to `cut`, in thread 0.
__device__ __forceinline__ int choose(const Row &row, Shared &memory, u64 cut, float temperature,
                                      u32 noise_key) {
    float best = -INFINITY;
    int best_token = row.vocab_size;
    row.for_each(memory, [&](u64 key) {
        if (key > cut) return;
        const int token = token_of(key);
        const float score = row.logit(token) / temperature + noise(noise_key, token);
        if (score > best || (score == best && token < best_token)) best = score, best_token = token;
    });
    memory.scores[thread()] = best;
    memory.tokens[thread()] = best_token;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (thread() < half) {
            const float other = memory.scores[thread() + half];
            const int other_token = memory.tokens[thread() + half];
            if (other > best || (other == best && other_token < best_token))
                best = other, best_token = other_token;
            memory.scores[thread()] = best;
            memory.tokens[thread()] = best_token;
        }
        __syncthreads();
    }
    return best_token;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_filtered(const __grid_constant__ Arguments a) {
    SHARED_MEMORY(shared_memory);
    Shared &memory = *(Shared *)shared_memory;
    const int slot = a.slots[blockIdx.x];
    const float temperature = a.temperature[slot * a.stride_float];
    const float top_p = a.top_p[slot * a.stride_float];
    const int top_k = a.top_k[slot * a.stride_int];
    const u32 max_distance = a.max_distance[slot * a.stride_int];
    const bool has_min_p = max_distance < (u32)MAX_LOGIT_UNITS;
    const bool is_filtered = top_k < a.vocab_size || top_p < 1.0f || has_min_p;
    const int likeliest = a.tokens[blockIdx.x];
    if (temperature == 0.0f || !is_filtered || likeliest < 0) return;
    Row row;
    row.logits = (const char *)a.logits + blockIdx.x * a.stride_logits * LOGIT_BYTES;
    row.vocab_size = a.vocab_size;
    row.largest = row.logit(likeliest);
    row.units_per_logit = 67108864.0f / temperature;
    row.is_listed = false;
    u64 cut = has_min_p ? (((u64)max_distance + 1) << TOKEN_BITS) - 1 : NO_KEY;
    if (top_k < a.vocab_size) cut = find_cut(row, memory, cut, top_k, 1.0f);
    if (top_p < 1.0f) cut = find_cut(row, memory, cut, 0, top_p);
    u32 noise_key = mix((u32)a.positions[blockIdx.x]);
    noise_key = mix((u32)a.seed_high[slot * a.stride_int] ^ noise_key);
    noise_key = mix((u32)a.seed_low[slot * a.stride_int] ^ noise_key);
    const int token = choose(row, memory, cut, temperature, noise_key);
    if (thread() == 0) a.tokens[blockIdx.x] = token;
}
