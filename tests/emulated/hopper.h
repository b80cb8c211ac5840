// octavo/ops/cuda/hopper.cuh without a GPU: what each of its functions does, in plain C++. A kernel compiled with this header
// instead runs on a processor, with the real code of every thread, as slowly as that is.
//
// Each thread of a kernel is a coroutine. It runs until it has to wait for others (for its warp at a shuffle or a tensor core,
// for its block at a barrier, for another block, for a copy), then any other that can go on is drawn, from a seed: what is right
// only in some order fails in another. With some seeds one warp of each block lags far behind. Copies arrive when it pleases the
// same seed. If nobody can go on, or somebody misuses a barrier, that is an error.
//
// Memory is the processor's own, so what a GPU may read too early, or from a cache that was not told, is not found here.

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

struct Meeting {  // of `count` threads, again and again
    u32 count = 0;
    std::vector<struct Thread *> there;
};

struct Thread {
    u32 index, block, turns = 0;  // turns: how often its warp has met
    jmp_buf at;
    ucontext_t first;
    std::unique_ptr<char[]> stack;
    bool begun = false;
};

struct Warp {
    Meeting meeting{32};
    u32 told[2][32][4];  // what each lane says, in turn: some may say the next while others still read
};

struct Block {
    std::vector<char> shared;
    std::vector<Warp> warps;
    std::map<int, Meeting> meetings;  // named barriers
};

struct Barrier {  // as it lies in shared memory
    uint16_t count, left;
    int32_t bytes : 31;
    u32 parity : 1;
};
static_assert(sizeof(Barrier) == 8, "");

struct Copy {
    char *to;
    std::vector<char> what;
    u32 block, barrier;
};

struct Machine {
    std::vector<Block> blocks;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Thread *> ready;
    std::map<const void *, std::vector<Thread *>> waiting;  // for something to happen there
    std::vector<Copy> copies;
    Thread *now = nullptr;
    jmp_buf scheduler;
    void (*kernel)(const void *);
    const void *argument;
    u64 random;
    u32 alive;
    bool prompt;  // copies come soon; else as late as can be
    u32 late;     // a warp of each block that goes on when hardly anybody else can; none, if there is no such warp
    std::string error;
};
static Machine *machine;

inline u32 drawn(u32 below) {
    machine->random = machine->random * 6364136223846793005ull + 1442695040888963407ull;
    return (u32)((machine->random >> 33) % below);
}

inline void suspend() {  // until somebody puts this thread among those that are ready
    if (!_setjmp(machine->now->at)) _longjmp(machine->scheduler, 1);
}
inline void fail(const std::string &why) {
    if (machine->error.empty())
        machine->error =
            "block " + std::to_string(machine->now->block) + ", thread " + std::to_string(machine->now->index) + ": " + why;
    machine->alive = 0;
    suspend();
}
inline void wake(const void *where) {
    auto found = machine->waiting.find(where);
    if (found == machine->waiting.end()) return;
    for (Thread *thread : found->second) machine->ready.push_back(thread);
    machine->waiting.erase(found);
}
inline void wait_at(const void *where) {
    machine->waiting[where].push_back(machine->now);
    suspend();
}
inline void come_to(Meeting &meeting) {
    if (meeting.there.size() + 1 < meeting.count) {
        meeting.there.push_back(machine->now);
        return suspend();
    }
    for (Thread *thread : meeting.there) machine->ready.push_back(thread);
    meeting.there.clear();
}

inline Block &block() { return machine->blocks[machine->now->block]; }
inline char *memory(u32 at) { return block().shared.data() + at; }

inline Barrier &barrier(u32 block, u32 at) { return *(Barrier *)(machine->blocks[block].shared.data() + at); }
inline void settle(Barrier &b) {
    if (b.left || b.bytes) return;
    b.left = b.count, b.parity ^= 1;
    wake(&b);
}

// Something has come by itself.
inline void deliver_one() {
    const u32 i = drawn(machine->copies.size());
    Copy copy = std::move(machine->copies[i]);
    machine->copies.erase(machine->copies.begin() + i);
    memcpy(copy.to, copy.what.data(), copy.what.size());
    Barrier &b = barrier(copy.block, copy.barrier);
    b.bytes -= copy.what.size();
    settle(b);
}

// What all lanes of this warp say, by lane.
typedef u32 Words[4];
inline const Words *told(u32 a, u32 b = 0, u32 c = 0, u32 d = 0) {
    Warp &warp = block().warps[machine->now->index / 32];
    const u32 turn = machine->now->turns++ % 2;
    u32(&mine)[4] = warp.told[turn][machine->now->index % 32];
    mine[0] = a, mine[1] = b, mine[2] = c, mine[3] = d;
    come_to(warp.meeting);
    return warp.told[turn];
}

inline void begin() {
    machine->kernel(machine->argument);
    machine->alive--;
    _longjmp(machine->scheduler, 1);
}

inline void go_on(Thread *thread) {
    machine->now = thread, threadIdx.x = thread->index, blockIdx.x = thread->block;
    if (_setjmp(machine->scheduler)) return;
    if (thread->begun) _longjmp(thread->at, 1);
    thread->begun = true;
    setcontext(&thread->first);
}

inline std::string run(void (*kernel)(const void *), const void *argument, int blocks, int threads, int shared, u64 seed) {
    Machine m;
    machine = &m;
    m.kernel = kernel, m.argument = argument, m.random = seed, m.prompt = seed % 2, m.alive = blocks * threads;
    m.late = seed / 2 % 2 ? drawn(threads / 32) : ~0u;
    m.blocks.resize(blocks);
    for (int b = 0; b < blocks; b++) {
        m.blocks[b].shared.resize(shared, (char)0xff);  // NaN
        m.blocks[b].warps.resize(threads / 32);
        m.blocks[b].meetings[0].count = threads;
        for (int i = 0; i < threads; i++) {
            auto thread = std::make_unique<Thread>();
            thread->index = i, thread->block = b;
            thread->stack.reset(new char[STACK]);
            getcontext(&thread->first);
            thread->first.uc_stack.ss_sp = thread->stack.get(), thread->first.uc_stack.ss_size = STACK;
            thread->first.uc_link = nullptr;
            makecontext(&thread->first, begin, 0);
            m.ready.push_back(thread.get());
            m.threads.push_back(std::move(thread));
        }
    }
    while (m.alive) {
        if (!m.copies.empty() && (m.ready.empty() || (m.prompt && drawn(32) == 0))) {
            deliver_one();
            continue;
        }
        if (m.ready.empty()) return "nobody can go on: " + std::to_string(m.alive) + " threads wait";
        for (int tries = 0; tries < 16; tries++) {
            std::swap(m.ready[drawn(m.ready.size())], m.ready.back());
            if (m.ready.back()->index / 32 != m.late) break;
        }
        Thread *next = m.ready.back();
        m.ready.pop_back();
        go_on(next);
    }
    if (m.error.empty() && !m.copies.empty()) return "copies are on their way, and nobody waits for them";
    return m.error;
}

template <class Argument>
void call(void (*kernel)(Argument), const void *argument) {
    kernel(*(const Argument *)argument);
}

}  // namespace emulated

// What tests/emulated/__init__.py calls: 0, or 1 and an error.
#define EMULATED(kernel)                                                                                                \
    extern "C" int launch(const void *argument, int blocks, int threads, int shared, u64 seed, char *error, int size) { \
        std::string why =                                                                                               \
            emulated::run([](const void *a) { emulated::call(kernel, a); }, argument, blocks, threads, shared, seed);   \
        snprintf(error, size, "%s", why.c_str());                                                                       \
        return !why.empty();                                                                                            \
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

// ---- memory that all multiprocessors see ------------------------------------------------------------

inline uint4 load_l2(const void *p) {
    if ((u64)p % 16) emulated::fail("16 bytes are read from where they cannot be");
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

// ---- a block's threads and its memory ---------------------------------------------------------------

template <int COUNT>
void named_barrier() {
    emulated::Meeting &meeting = emulated::block().meetings[1];
    meeting.count = COUNT;
    emulated::come_to(meeting);
}
inline u32 atomicAdd(u32 *p, u32 amount) {
    const u32 old = *p;
    *p += amount;
    return old;
}
inline void __syncthreads() { emulated::come_to(emulated::block().meetings[0]); }
inline void __syncwarp() { emulated::told(0); }
inline float __shfl_xor_sync(u32, float x, int mask) {
    return __uint_as_float(emulated::told(__float_as_uint(x))[threadIdx.x % 32 ^ mask][0]);
}
inline int __shfl_sync(u32, int x, int lane) { return emulated::told(x)[lane % 32][0]; }

inline u32 shared(const void *p) { return (const char *)p - emulated::memory(0); }
inline void mbarrier_init(u32 barrier, u32 count) {
    emulated::Barrier &b = emulated::barrier(blockIdx.x, barrier);
    b.count = b.left = count, b.bytes = 0, b.parity = 0;
}
inline void mbarrier_fence() {}
inline void mbarrier_arrive(u32 barrier) {
    emulated::Barrier &b = emulated::barrier(blockIdx.x, barrier);
    if (!b.left) emulated::fail("more have arrived at a barrier than it was made for");
    b.left--;
    emulated::settle(b);
}
template <int BYTES>
void mbarrier_expect(u32 barrier) {
    emulated::barrier(blockIdx.x, barrier).bytes += BYTES;
    mbarrier_arrive(barrier);
}
inline void mbarrier_wait(u32 barrier, u32 parity) {  // until the phase of that parity is over
    emulated::Barrier &b = emulated::barrier(blockIdx.x, barrier);
    while (b.parity == parity) emulated::wait_at(&b);
}

// ---- copies of whole tiles --------------------------------------------------------------------------

struct alignas(64) Map {  // a matrix [outputs, inputs] of `halves`, copied so many columns of 64 at a time
    const char *matrix;
    u64 outputs, inputs, halves, columns, unused[11];
};
inline void prefetch_map(const Map *) {}

inline void copy(u32 to, const Map *map, int output, int column, u32 barrier) {
    emulated::Copy copy{emulated::memory(to), std::vector<char>(map->columns * 1024), blockIdx.x, barrier};
    const int half = map->outputs / map->halves, lines = 8 / map->halves;
    for (int c = 0; c < (int)map->columns; c++)
        for (int line = 0; line < 8; line++)
            for (int part = 0; part < 8; part++) {
                const int row = output + line % lines, from = (column + c) * 64 + part * 8;
                char *at = copy.what.data() + c * 1024 + line * 128 + (part ^ line) * 16;
                if (row >= half || from >= (int)map->inputs)
                    memset(at, 0, 16);
                else
                    memcpy(at, map->matrix + ((line / lines * half + row) * map->inputs + from) * 2, 16);
            }
    emulated::machine->copies.push_back(std::move(copy));
}

// ---- tensor cores -----------------------------------------------------------------------------------

inline void ldmatrix_x4(u32 (&r)[4], u32 at) {
    if (at % 16) emulated::fail("a matrix is loaded from where it cannot be");
    const emulated::Words *lines = emulated::told(at);
    for (u32 i = 0; i < 4; i++) memcpy(&r[i], emulated::memory(lines[i * 8 + threadIdx.x % 32 / 4][0]) + threadIdx.x % 4 * 4, 4);
}
inline void multiply(float (&c)[4], u32 a, u32 a_after, u32 b, u32 b_after) {
    const emulated::Words *said = emulated::told(a, a_after, b, b_after);
    const u32 lane = threadIdx.x % 32;
    for (u32 j = 0; j < 2; j++)
        for (u32 half = 0; half < 2; half++)
            for (u32 t = 0; t < 4; t++) {
                const u32 x = said[lane / 4 * 4 + t][half], y = said[(lane % 4 * 2 + j) * 4 + t][2 + half];
                c[j] += low(x) * low(y) + high(x) * high(y);
            }
}
