// Instructions of a Hopper GPU as C++ functions, one each. tests/emulated/hopper.h implements the
// same functions in plain C++, so that kernels run without a GPU.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // bits of a bfloat16
#define INFINITY __int_as_float(0x7f800000)
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) char name[]

// ---- numbers ------------------------------------------------------------------------------------

__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float half_to_float(u32 bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)bits));
    return y;
}
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log_(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.6931471805599453f;
}

// The thread index, read again at each call, so that values derived from it do not occupy registers
// for long.
__device__ __forceinline__ int thread() {
    int i;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(i));
    return i;
}

// ---- memory shared by all multiprocessors -------------------------------------------------------

// Bypasses L1, because another multiprocessor wrote the data.
__device__ __forceinline__ uint4 load_l2(const void *p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ float load_l2_bf16(const bf16 *p) {
    bf16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return to_float(v);
}
__device__ __forceinline__ float load_l2_float(const float *p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
// Increments a counter with release semantics: a reader of the new value sees all earlier writes in
// the L2 cache.
__device__ __forceinline__ void grid_arrive(u32 *p) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
__device__ __forceinline__ void grid_wait(const u32 *p, u32 count) {
    u32 seen;
    for (u32 i = 0;; i++) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
        if (seen >= count) break;
        if (i == 1u << 23)
            asm volatile("trap;");  // after seconds: trap instead of hanging the device
    }
}
__device__ __forceinline__ void prefetch_l2(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ---- barriers and shared memory of a block ------------------------------------------------------

template <int COUNT>  // number of threads that take part
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}
__device__ __forceinline__ u32 shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers in shared memory (mbarrier), eight bytes each. A phase completes when `count` threads
// and all expected bytes have arrived.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void mbarrier_fence() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::
                     : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void mbarrier_expect(u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra "
        "again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- TMA copies ---------------------------------------------------------------------------------

struct alignas(64) Map {  // a TMA descriptor, made by tensor_map() in driver.py
    u64 words[16];
};
__device__ __forceinline__ void prefetch_map(const Map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

// Copies a chunk [columns][8][64] of a weight matrix, starting at an output and a column of 64
// inputs, and signals `barrier`. Weights are read once per step, so they are marked evict-first in
// the L2 cache.
__device__ __forceinline__ void copy(u32 to, const Map *map, int output, int column, u32 barrier) {
    asm volatile(
        "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
        "  cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::"
        "cache_hint"
        "  [%0], [%1, {%2, %3, %2, %4}], [%5], once; }" ::"r"(to),
        "l"(map), "r"(0), "r"(output), "r"(column), "r"(barrier)
        : "memory");
}

// ---- tensor cores -------------------------------------------------------------------------------

// Loads four 8x8 matrices of bf16. A lane passes the address of line lane % 8 of matrix lane / 8.
// It receives elements 2 (lane % 4) and 2 (lane % 4) + 1 of line lane / 4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
// c [8][8] += a [8][16] b [8][16]^T, with operands in registers as ldmatrix_x4 returns them. The
// instruction takes 16 lines of a; the other eight are zero.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a, u32 a_after, u32 b, u32 b_after) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, "
        "{%7, %8}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a), "r"(0), "r"(a_after), "r"(b), "r"(b_after));
}
