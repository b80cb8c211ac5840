// Instructions of a Hopper GPU that C++ has no words for, one function each. What they do, in plain C++: tests/emulated/hopper.h,
// which kernels are compiled with where there is no GPU.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // its bits
#define INFINITY __int_as_float(0x7f800000)
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) char name[]

// ---- numbers ----------------------------------------------------------------------------------------

__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float wide(bf16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ bf16 narrow(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// This thread's number, asked for anew each time: what is computed from it is not kept in registers for long.
__device__ __forceinline__ int thread() {
    int i;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(i));
    return i;
}

// ---- memory that all multiprocessors see ------------------------------------------------------------

__device__ __forceinline__ uint4 fresh(const void *p) {  // from the L2 cache: another multiprocessor wrote it
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ float fresh_one(const bf16 *p) {
    bf16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return wide(v);
}
__device__ __forceinline__ float fresh_float(const float *p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
// One more at p; whoever sees it finds in the L2 cache what was written before.
__device__ __forceinline__ void count_up(u32 *p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
__device__ __forceinline__ void wait_for_count(const u32 *p, u32 count) {
    u32 seen;
    for (u32 i = 0;; i++) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
        if (seen >= count) break;
        if (i == 1u << 23) asm volatile("trap;");  // seconds: an error rather than a device that hangs
    }
}
__device__ __forceinline__ void fetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- a block's threads and its memory ---------------------------------------------------------------

template <int COUNT>  // of the block's threads: the first, as a rule
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}
__device__ __forceinline__ u32 shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers in shared memory, eight bytes each: passed when `count` have arrived and all bytes that were expected have come.
__device__ __forceinline__ void barrier_begin(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barriers_begun() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void arrive_and_expect(u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- copies of whole tiles --------------------------------------------------------------------------

struct alignas(64) Map {  // of a matrix: driver.py, tensor_map()
    u64 words[16];
};
__device__ __forceinline__ void fetch_map(const Map *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map)); }

// [columns][8][64] of a matrix of weights, from an output and a column of 64 inputs on; `barrier` gets their bytes. Weights are
// read once a step: they need not push anything else out of the L2 cache.
__device__ __forceinline__ void copy(u32 to, const Map *map, int output, int column, u32 barrier) {
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
        "  cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        "  [%0], [%1, {%2, %3, %2, %4}], [%5], once; }" ::"r"(to),
        "l"(map), "r"(0), "r"(output), "r"(column), "r"(barrier)
        : "memory");
}

// ---- tensor cores -----------------------------------------------------------------------------------

// Four matrices [8][8] of bf16; a lane names the address of a line: of matrix lane / 8, line lane % 8. It gets of each the
// elements 2 (lane % 4) and the one after of line lane / 4.
__device__ __forceinline__ void load4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
// c [8][8] += a [8][16] b [8][16], transposed; each in registers as load4 gives them: a and b as two matrices of eight columns.
// The instruction takes 16 lines of a; the other eight are none.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a, u32 a_after, u32 b, u32 b_after) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a), "r"(0), "r"(a_after), "r"(b), "r"(b_after));
}
