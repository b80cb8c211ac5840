// An emulation of octavo/ops/cuda/hopper.cuh in plain C++. A kernel that is compiled with this header runs on a CPU. Every
// thread of the kernel executes its real code, which is slow.
//
// Each thread of a kernel is a coroutine. It runs until it waits: for its warp at a shuffle or a tensor core instruction, for
// its block at a barrier, for another block, or for a copy. A random generator with a given seed then chooses the next thread,
// so a kernel that is correct only in one order fails with another seed. With some seeds, one warp of each block lags far
// behind. The same generator decides when copies arrive. A deadlock and a misused barrier are errors.
//
// All threads share the memory of the CPU. The emulation therefore does not find reads that come too early on a GPU, nor reads
// from a stale cache.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) char *name = emulated::memory(0)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
struct uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

static struct {
    u32 x;
} threadIdx, blockIdx;

// ---- threads ----------------------------------------------------------------------------------------

namespace emulated {

constexpr int STACK = 128 << 10;

struct Rendezvous {  // A barrier of `count` threads that can be reused.
    u32 count = 0;
    std::vector<struct Thread *> arrived;
};

struct Thread {
    u32 index;
    u32 block;
    u32 num_exchanges = 0;  // of values between the lanes of its warp
    jmp_buf suspended;
    ucontext_t entry;
    std::unique_ptr<char[]> stack;
    bool started = false;
};

struct Warp {
    Rendezvous rendezvous{32};
    // Values of each lane. There are two buffers: fast lanes may write the next values while others still read.
    u32 lane_values[2][32][4];
};

struct Block {
    std::vector<char> shared;
    std::vector<Warp> warps;
    std::map<int, Rendezvous> rendezvous;  // named barriers
};

struct Barrier {  // An mbarrier in shared memory.
    uint16_t count;
    uint16_t pending;  // arrivals
    int32_t bytes : 31;
    u32 parity : 1;
};
static_assert(sizeof(Barrier) == 8, "");

struct Copy {
    char *target;
    std::vector<char> bytes;
    u32 block;
    u32 barrier;
};

struct Machine {
    std::vector<Block> blocks;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Thread *> ready;
    std::map<const void *, std::vector<Thread *>> waiting;  // by the address that they wait at
    std::vector<Copy> copies;
    Thread *current = nullptr;
    jmp_buf scheduler;
    void (*kernel)(const void *);
    const void *argument;
    u64 random;
    u32 alive;
    bool early_copies;  // Copies arrive early. Otherwise they arrive as late as possible.
    u32 lagging_warp;   // The index in its block of a warp that rarely runs, or ~0 for none.
    std::string error;
};
static Machine *machine;

inline u32 random_below(u32 limit) {
    machine->random = machine->random * 6364136223846793005ull + 1442695040888963407ull;
    return (u32)((machine->random >> 33) % limit);
}

inline void suspend() {  // Return when another thread has put this one into `ready`.
    if (!_setjmp(machine->current->suspended)) _longjmp(machine->scheduler, 1);
}
inline void fail(const std::string &reason) {
    if (machine->error.empty())
        machine->error =
            "block " + std::to_string(machine->current->block) + ", thread " + std::to_string(machine->current->index) + ": " + reason;
    machine->alive = 0;
    suspend();
}
inline void wake(const void *address) {
    auto found = machine->waiting.find(address);
    if (found == machine->waiting.end()) return;
    for (Thread *thread : found->second) machine->ready.push_back(thread);
    machine->waiting.erase(found);
}
inline void wait_at(const void *address) {
    machine->waiting[address].push_back(machine->current);
    suspend();
}
inline void arrive_and_wait(Rendezvous &rendezvous) {
    if (rendezvous.arrived.size() + 1 < rendezvous.count) {
        rendezvous.arrived.push_back(machine->current);
        return suspend();
    }
    for (Thread *thread : rendezvous.arrived) machine->ready.push_back(thread);
    rendezvous.arrived.clear();
}

inline Block &block() { return machine->blocks[machine->current->block]; }
inline char *memory(u32 offset) { return block().shared.data() + offset; }

inline Barrier &barrier(u32 block, u32 offset) {
    return *(Barrier *)(machine->blocks[block].shared.data() + offset);
}
inline void complete_if_done(Barrier &b) {
    if (b.pending || b.bytes) return;
    b.pending = b.count;
    b.parity ^= 1;
    wake(&b);
}

// Let one outstanding copy arrive.
inline void deliver_one() {
    const u32 i = random_below(machine->copies.size());
    Copy copy = std::move(machine->copies[i]);
    machine->copies.erase(machine->copies.begin() + i);
    memcpy(copy.target, copy.bytes.data(), copy.bytes.size());
    Barrier &b = barrier(copy.block, copy.barrier);
    b.bytes -= copy.bytes.size();
    complete_if_done(b);
}

// Give every lane the values of all lanes of its warp.
typedef u32 Words[4];
inline const Words *exchange(u32 a, u32 b = 0, u32 c = 0, u32 d = 0) {
    Warp &warp = block().warps[machine->current->index / 32];
    const u32 buffer = machine->current->num_exchanges++ % 2;
    u32(&mine)[4] = warp.lane_values[buffer][machine->current->index % 32];
    mine[0] = a;
    mine[1] = b;
    mine[2] = c;
    mine[3] = d;
    arrive_and_wait(warp.rendezvous);
    return warp.lane_values[buffer];
}

inline void run_thread() {
    machine->kernel(machine->argument);
    machine->alive--;
    _longjmp(machine->scheduler, 1);
}

inline void resume(Thread *thread) {
    machine->current = thread;
    threadIdx.x = thread->index;
    blockIdx.x = thread->block;
    if (_setjmp(machine->scheduler)) return;
    if (thread->started) _longjmp(thread->suspended, 1);
    thread->started = true;
    setcontext(&thread->entry);
}

inline std::string run(void (*kernel)(const void *), const void *argument, int blocks, int threads, int shared, u64 seed) {
    Machine m;
    machine = &m;
    m.kernel = kernel;
    m.argument = argument;
    m.random = seed;
    m.early_copies = seed % 2;
    m.alive = blocks * threads;
    m.lagging_warp = seed / 2 % 2 ? random_below(threads / 32) : ~0u;
    m.blocks.resize(blocks);
    for (int b = 0; b < blocks; b++) {
        m.blocks[b].shared.resize(shared, (char)0xff);  // NaN
        m.blocks[b].warps.resize(threads / 32);
        m.blocks[b].rendezvous[0].count = threads;
        for (int i = 0; i < threads; i++) {
            auto thread = std::make_unique<Thread>();
            thread->index = i;
            thread->block = b;
            thread->stack.reset(new char[STACK]);
            getcontext(&thread->entry);
            thread->entry.uc_stack.ss_sp = thread->stack.get();
            thread->entry.uc_stack.ss_size = STACK;
            thread->entry.uc_link = nullptr;
            makecontext(&thread->entry, run_thread, 0);
            m.ready.push_back(thread.get());
            m.threads.push_back(std::move(thread));
        }
    }
    while (m.alive) {
        if (!m.copies.empty() && (m.ready.empty() || (m.early_copies && random_below(32) == 0))) {
            deliver_one();
            continue;
        }
        if (m.ready.empty()) return "deadlock: " + std::to_string(m.alive) + " threads wait";
        for (int tries = 0; tries < 16; tries++) {
            std::swap(m.ready[random_below(m.ready.size())], m.ready.back());
            if (m.ready.back()->index / 32 != m.lagging_warp) break;
        }
        Thread *next = m.ready.back();
        m.ready.pop_back();
        resume(next);
    }
    if (m.error.empty() && !m.copies.empty()) return "the kernel ended before its copies arrived";
    return m.error;
}

template <class Argument>
void call(void (*kernel)(Argument), const void *argument) {
    kernel(*(const Argument *)argument);
}

}  // namespace emulated

// The function that tests/emulated/__init__.py calls. It returns 0, or 1 and an error message.
#define EMULATED(kernel)                                                                                                \
    extern "C" int launch(const void *argument, int blocks, int threads, int shared, u64 seed, char *error, int size) { \
        std::string reason =                                                                                              \
            emulated::run([](const void *a) { emulated::call(kernel, a); }, argument, blocks, threads, shared, seed);   \
        snprintf(error, size, "%s", reason.c_str());                                                                       \
        return !reason.empty();                                                                                            \
    }

// ---- numbers ----------------------------------------------------------------------------------------

inline float __uint_as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline u32 __float_as_uint(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
inline float low(u32 x) { return __uint_as_float(x << 16); }
inline float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
inline float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }
inline float half_to_float(u32 bits) {
    const unsigned short half = bits;
    _Float16 x;
    memcpy(&x, &half, 2);
    return x;
}
inline bf16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float exp2_(float x) { return exp2f(x); }
inline float log_(float x) { return logf(x); }
inline int thread() { return threadIdx.x; }

// ---- global memory -----------------------------------------------------------------------------------

inline uint4 load_l2(const void *p) {
    if ((u64)p % 16) emulated::fail("a 16-byte load is not aligned");
    return *(const uint4 *)p;
}
inline float load_l2_bf16(const bf16 *p) { return to_float(*p); }
inline float load_l2_float(const float *p) { return *p; }
inline void grid_arrive(u32 *p) {
    ++*p;
    emulated::wake(p);
}
inline void grid_wait(const u32 *p, u32 count) {
    while (*p < count) emulated::wait_at(p);
}
inline void prefetch_l2(const void *) {}

// ---- thread blocks and shared memory ----------------------------------------------------------------

template <int COUNT>
void named_barrier() {
    emulated::Rendezvous &rendezvous = emulated::block().rendezvous[1];
    rendezvous.count = COUNT;
    emulated::arrive_and_wait(rendezvous);
}
inline u32 atomicAdd(u32 *p, u32 amount) {
    const u32 old = *p;
    *p += amount;
    return old;
}
inline void __syncthreads() { emulated::arrive_and_wait(emulated::block().rendezvous[0]); }
inline void __syncwarp() { emulated::exchange(0); }
inline float __shfl_xor_sync(u32, float x, int mask) {
    return __uint_as_float(emulated::exchange(__float_as_uint(x))[threadIdx.x % 32 ^ mask][0]);
}
inline int __shfl_sync(u32, int x, int lane) { return emulated::exchange(x)[lane % 32][0]; }

inline u32 shared(const void *p) { return (const char *)p - emulated::memory(0); }
inline void mbarrier_init(u32 barrier, u32 count) {
    emulated::Barrier &b = emulated::barrier(blockIdx.x, barrier);
    b.count = count;
    b.pending = count;
    b.bytes = 0;
    b.parity = 0;
}
inline void mbarrier_fence() {}
inline void mbarrier_arrive(u32 barrier) {
    emulated::Barrier &b = emulated::barrier(blockIdx.x, barrier);
    if (!b.pending) emulated::fail("more threads arrive at a barrier than its count");
    b.pending--;
    emulated::complete_if_done(b);
}
template <int BYTES>
void mbarrier_expect(u32 barrier) {
    emulated::barrier(blockIdx.x, barrier).bytes += BYTES;
    mbarrier_arrive(barrier);
}
inline void mbarrier_wait(u32 barrier, u32 parity) {  // Wait until the phase with this parity has completed.
    emulated::Barrier &b = emulated::barrier(blockIdx.x, barrier);
    while (b.parity == parity) emulated::wait_at(&b);
}

// ---- TMA copies of tiles ----------------------------------------------------------------------------

// A matrix [outputs, inputs] in `halves` parts. One copy takes `columns` columns of 64 numbers.
struct alignas(64) Map {
    const char *matrix;
    u64 outputs;
    u64 inputs;
    u64 halves;
    u64 columns;
    u64 unused[11];
};
inline void prefetch_map(const Map *) {}

inline void copy(u32 to, const Map *map, int output, int column, u32 barrier) {
    emulated::Copy copy{emulated::memory(to), std::vector<char>(map->columns * 1024), blockIdx.x, barrier};
    const int half = map->outputs / map->halves, lines = 8 / map->halves;
    for (int c = 0; c < (int)map->columns; c++)
        for (int line = 0; line < 8; line++)
            for (int part = 0; part < 8; part++) {
                const int row = output + line % lines, from = (column + c) * 64 + part * 8;
                char *at = copy.bytes.data() + c * 1024 + line * 128 + (part ^ line) * 16;
                if (row >= half || from >= (int)map->inputs)
                    memset(at, 0, 16);
                else
                    memcpy(at, map->matrix + ((line / lines * half + row) * map->inputs + from) * 2, 16);
            }
    emulated::machine->copies.push_back(std::move(copy));
}

// ---- tensor cores -----------------------------------------------------------------------------------

inline void ldmatrix_x4(u32 (&r)[4], u32 at) {
    if (at % 16) emulated::fail("the address of ldmatrix is not aligned to 16 bytes");
    const emulated::Words *lines = emulated::exchange(at);
    for (u32 i = 0; i < 4; i++) memcpy(&r[i], emulated::memory(lines[i * 8 + threadIdx.x % 32 / 4][0]) + threadIdx.x % 4 * 4, 4);
}
inline void multiply(float (&c)[4], u32 a, u32 a_after, u32 b, u32 b_after) {
    const emulated::Words *values = emulated::exchange(a, a_after, b, b_after);
    const u32 lane = threadIdx.x % 32;
    for (u32 j = 0; j < 2; j++)
        for (u32 half = 0; half < 2; half++)
            for (u32 t = 0; t < 4; t++) {
                const u32 x = values[lane / 4 * 4 + t][half], y = values[(lane % 4 * 2 + j) * 4 + t][2 + half];
                c[j] += low(x) * low(y) + high(x) * high(y);
            }
}
