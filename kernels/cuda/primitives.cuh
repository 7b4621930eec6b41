// The instructions that our kernels use, one function each; many are Hopper's. A test gives the same
// names to an emulator for a CPU.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// What a load or a store moves at once.
struct alignas(8) Pair { float x, y; };
struct alignas(16) Four { float x, y, z, w; };
struct alignas(16) Words { u32 of[4]; };

#define DEVICE __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL __global__ __launch_bounds__(THREADS)
#define SHARED_MEMORY extern __shared__ __align__(128) char shared[];

DEVICE u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, later; zeros where not `there`.
DEVICE void copy_16(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
// A barrier in shared memory, of so many arrivals a phase; phases count from 0.
DEVICE void prepare(u64 *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals)
                 : "memory");
}
DEVICE void arrive(u64 *barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(address(barrier))
                 : "memory");
}
// Once all copies that this thread has begun are there.
DEVICE void arrive_with_copies(u64 *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(barrier))
                 : "memory");
}
DEVICE void wait_for(u64 *barrier, int phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again%=:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@done bra over%=;\n"
                 "bra again%=;\n"
                 "over%=:\n"
                 "}" ::"r"(address(barrier)),
                 "r"(phase & 1)
                 : "memory");
}

// Four matrices of 8 x 8, transposed; lane l names row l % 8 of matrix l / 8.
DEVICE void matrices_transposed(u32 (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address(row))
                 : "memory");
}

// c += a b, of 16 x 16 and 16 x 8 in bf16.
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// A matrix of 8 x 8 halves, lane l with row l / 4, columns l % 4 * 2 and the next, transposed.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE u32 from_lane(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE u64 from_lane(u64 x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE float from_lane_xor(float x, int by) { return __shfl_xor_sync(~0u, x, by); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }
// The warps of COUNT threads that meet at barrier ID, 1 to 15.
template <int ID, int COUNT> DEVICE void sync_some() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
// Until the kernel before this one has ended, where the launch lets this one begin earlier; before
// Hopper none does.
DEVICE void wait_for_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// What was there before, and is now with x added, in one step.
DEVICE u32 add_to(u32 *to, u32 x) { return atomicAdd(to, x); }
DEVICE u64 add_to(u64 *to, u64 x) { return atomicAdd(to, x); }

// Roundings that no compiler may fuse.
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float divided(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float nearest(float x) { return rintf(x); }
DEVICE float rounded_up(double x) { return __double2float_ru(x); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Two numbers in bf16, the first in the low half.
DEVICE u32 rounded(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
