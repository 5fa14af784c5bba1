// What every kernel stands on: the machine's primitives, number formats, packs, the sum over a row.
//
// Knows:    the constants that program.py writes in front of it. The only file with #if: one branch for NVIDIA (NVRTC),
//           one for AMD (hipRTC, or clang without any HIP header), one for the host's C++ compiler; one is filled by
//           tests.
// Must not: include anything, or know what a norm is.
//
// On the host a block is one thread, so the same text is a plain loop over rows that the compiler vectorises.

constexpr int THREADS = THREADS_PER_ROW * ROWS_PER_BLOCK;
constexpr int WAVES_PER_ROW = (THREADS_PER_ROW + WAVE - 1) / WAVE;

constexpr int WAVES_PER_SIMD = BLOCKS_PER_UNIT * THREADS < 8 * WAVE ? 1 : BLOCKS_PER_UNIT * THREADS / (4 * WAVE);

typedef long long int64;
typedef unsigned int uint32;
typedef unsigned short uint16;

// ---------------------------------------------------------------------------------------------- the machine

#if defined(__CUDACC__)  // ---- NVIDIA

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define LAMBDA
#define CONSTEXPR __host__ __device__ constexpr
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_UNIT)
#define SHARED __shared__
#define DYNAMIC_SHARED(type, name, begin, count) \
    extern __shared__ uint4 shared_memory[];     \
    type* const name = reinterpret_cast<type*>(reinterpret_cast<char*>(shared_memory) + (begin))
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define ENTRY(kernel)

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE void sync() { __syncthreads(); }
DEVICE float as_float(uint32 bits) { return __uint_as_float(bits); }
DEVICE uint32 as_bits(float value) { return __float_as_uint(value); }
DEVICE float madd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double madd(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE float inverse_sqrt(float v) { return rsqrtf(v); }
DEVICE double inverse_sqrt(double v) { return 1.0 / sqrt(v); }
// An empty asm would do for the compiler, but its assembler sees through it: it needs a zero that it does not know.
DEVICE void forget(uint32& v, uint32 zero) { v ^= zero; }
DEVICE void forget(float& v, uint32 zero) { v = __uint_as_float(__float_as_uint(v) ^ zero); }
DEVICE void forget(double&, uint32) {}
constexpr bool HAS_UNIFORM = false;
DEVICE int uniform(int v) { return v; }
template <class T>
DEVICE void settle(T&) {}

DEVICE float widen_f16(uint16 bits) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}
// Two values to the halves of a word: one instruction where the card has it.
DEVICE uint32 narrow_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    uint16 a, b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
    return a | uint32(b) << 16;
#endif
}
#if __CUDA_ARCH__ >= 800
#define HAS_NARROW_BF16
DEVICE uint32 narrow_bf16(float low, float high) {
    uint32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#endif

#elif defined(__HIP_DEVICE_COMPILE__)  // ---- AMD: clang attributes and builtins only, so that no header is needed

#pragma clang fp contract(off)

#define DEVICE static __attribute__((device)) __attribute__((always_inline)) inline
#define DEVICE_MEMBER __attribute__((device)) __attribute__((always_inline))
#define LAMBDA __attribute__((always_inline))
#define CONSTEXPR constexpr
#define KERNEL                                                                                        \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS))) \
    __attribute__((amdgpu_waves_per_eu(WAVES_PER_SIMD))) void
#define SHARED __attribute__((shared))
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#define ENTRY(kernel)

DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
// For what goes through LDS, and no more: the bare barrier leaves LDS writes under way, and a workgroup fence waits for
// global memory too where a block may run on two CUs (RDNA), so for the next row's loads.
DEVICE void sync() {
#if defined(__GFX12__)
    asm volatile("s_wait_dscnt 0x0" ::: "memory");
#else
    asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
#endif
    __builtin_amdgcn_s_barrier();
    asm volatile("" ::: "memory");
}
DEVICE float as_float(uint32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE uint32 as_bits(float value) { return __builtin_bit_cast(uint32, value); }
DEVICE float madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double madd(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE float inverse_sqrt(float v) { return __builtin_amdgcn_rsqf(v); }
DEVICE double inverse_sqrt(double v) { return 1.0 / __builtin_sqrt(v); }
template <class T>
DEVICE void forget(T& v, uint32) {
    asm volatile("" : "+v"(v));
}
// The same value in all lanes of the wave, so that what follows from it is scalar.
constexpr bool HAS_UNIFORM = true;
DEVICE int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
// Here, and no sooner, a load is waited for. A value that a loop hands on would be waited for at the loop's head, and
// with it the stores since; one that no turn changes before the loop, and so before the loads of the row.
template <class T>
DEVICE void settle(T& v) {
    asm volatile("" : "+v"(v)::"memory");
}

DEVICE float widen_f16(uint16 bits) { return __builtin_bit_cast(_Float16, bits); }
DEVICE uint32 narrow_f16(float low, float high) {
    return __builtin_bit_cast(uint16, (_Float16)low) | uint32(__builtin_bit_cast(uint16, (_Float16)high)) << 16;
}
#if defined(__gfx950__) || defined(__gfx1250__)
#define HAS_NARROW_BF16
DEVICE uint32 narrow_bf16(float low, float high) {
    uint32 word;
    asm("v_cvt_pk_bf16_f32 %0, %1, %2" : "=v"(word) : "v"(low), "v"(high));
    return word;
}
#else
#define HAS_UPPER_HALVES
DEVICE uint32 upper_halves(uint32 low, uint32 high) { return __builtin_amdgcn_perm(high, low, 0x07060302); }
#endif

#elif defined(RMSNORM_RAW_LANES)  // ---- a GPU made of fibres, for tests: tests/lanes/lanes.h comes before this text

#else  // ---- the host: one thread a block, blocks one after the other

#define DEVICE static inline __attribute__((always_inline))
#define DEVICE_MEMBER __attribute__((always_inline))
#define LAMBDA __attribute__((always_inline))
#define CONSTEXPR constexpr
#define KERNEL extern "C" void
#define SHARED static
// The loops over a pack become one vector operation if g++ does not unroll them first: twice as fast in bf16.
#define UNROLL _Pragma("GCC unroll 1")
#define ROLLED

static thread_local int host_block;
DEVICE int thread_index() { return 0; }
DEVICE int block_index() { return host_block; }
DEVICE void sync() {}
DEVICE float as_float(uint32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
DEVICE uint32 as_bits(float value) {
    uint32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
DEVICE float madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double madd(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else  // without the instruction fma is a slow library call
DEVICE float madd(float a, float b, float c) { return a * b + c; }
DEVICE double madd(double a, double b, double c) { return a * b + c; }
#endif
DEVICE float inverse_sqrt(float v) { return 1.0f / __builtin_sqrtf(v); }
DEVICE double inverse_sqrt(double v) { return 1.0 / __builtin_sqrt(v); }
template <class T>
DEVICE void forget(T&, uint32) {}
constexpr bool HAS_UNIFORM = false;
DEVICE int uniform(int v) { return v; }
template <class T>
DEVICE void settle(T&) {}
constexpr int QUICK_SUM = 1;
template <int WIDTH, class T>
DEVICE T wave_sum(T v) {
    return v;
}

// fp16 by integers, without branches: not every C++ compiler has _Float16, and this vectorises.
DEVICE float widen_f16(uint16 bits) {
    uint32 magnitude = uint32(bits & 0x7fff) << 13, sign = uint32(bits & 0x8000) << 16;
    float scaled = as_float(magnitude) * 0x1p112f;  // moves the exponent's bias from 15 to 127, subnormals included
    uint32 special = magnitude | 0x7f800000;        // infinity and NaN keep their exponent of ones
    return as_float((magnitude >= 0x0f800000 ? special : as_bits(scaled)) | sign);
}
DEVICE uint32 half_bits(float value) {
    uint32 bits = as_bits(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32 normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;  // nearest, ties to even
    uint32 tiny = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;  // below 2^-14 the adder rounds at 2^-24
    uint32 result = magnitude < 0x38800000 ? tiny : normal;
    result = magnitude >= 0x477ff000 ? 0x7c00 : result;
    return (magnitude > 0x7f800000 ? 0x7e00 : result) | sign;
}
DEVICE uint32 narrow_f16(float low, float high) { return half_bits(low) | half_bits(high) << 16; }

// Any alignment will do: the compiler takes the vector moves of the CPU.
template <int COUNT, class T>
DEVICE void copy(T* to, const T* from) {
    __builtin_memcpy(to, from, COUNT * sizeof(T));
}

// ENTRY(kernel): `kernel_blocks(arguments, first, last)` runs blocks first … last-1. The arguments lie in one buffer at
// their natural alignment, the layout that a GPU's launch takes too.
template <int I, class T, class... Rest>
struct Nth {
    typedef typename Nth<I - 1, Rest...>::type type;
};
template <class T, class... Rest>
struct Nth<0, T, Rest...> {
    typedef T type;
};
template <class... All, class... Done>
static void run_blocks(void (*kernel)(All...), const char* arguments, unsigned long offset, int first, int last,
                       Done... done) {
    if constexpr (sizeof...(Done) == sizeof...(All)) {
        for (host_block = first; host_block < last; ++host_block) kernel(done...);
    } else {
        typename Nth<sizeof...(Done), All...>::type value;
        offset = (offset + alignof(decltype(value)) - 1) / alignof(decltype(value)) * alignof(decltype(value));
        __builtin_memcpy(&value, arguments + offset, sizeof(value));
        run_blocks(kernel, arguments, offset + sizeof(value), first, last, done..., value);
    }
}
#define ENTRY(kernel)                                                             \
    extern "C" void kernel##_blocks(const char* arguments, int first, int last) { \
        run_blocks(kernel, arguments, 0, first, last);                            \
    }

#endif

// Shared memory whose size the launch names, where that can be more than a program may declare: `count` of them, from
// byte `begin` of that memory on.
#if !defined(DYNAMIC_SHARED)
#define DYNAMIC_SHARED(type, name, begin, count) SHARED type name[(count) > 0 ? (count) : 1]
#endif

// The sum over a wave; on the machine of fibres it is the text of the device that it stands for.
#if defined(__CUDACC__) || defined(LANES_NVIDIA)

constexpr int QUICK_SUM = WAVE;  // lanes whose sum is cheap

// The sum over groups of WIDTH neighbouring lanes, in every lane. Adding is commutative, so a butterfly gives all
// lanes the same bits.
template <int WIDTH, class T>
DEVICE T wave_sum(T v) {
    UNROLL for (int mask = 1; mask < WIDTH; mask *= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

#elif defined(__HIP_DEVICE_COMPILE__) || defined(LANES_AMD)

// Two floats for the packed instructions of CDNA.
#define HAS_PAIRS
typedef float pair __attribute__((vector_size(8)));
DEVICE pair madd(pair a, pair b, pair c) {
#if __has_builtin(__builtin_elementwise_fma)  // clang 14 has not
    return __builtin_elementwise_fma(a, b, c);
#else
    return pair{madd(a[0], b[0], c[0]), madd(a[1], b[1], c[1])};
#endif
}

// A 32-bit value moved between lanes; a double moves as two halves.
template <class Move>
DEVICE float moved(float v, Move move) {
    return as_float(move(as_bits(v)));
}
template <class Move>
DEVICE double moved(double v, Move move) {
    unsigned long long bits = __builtin_bit_cast(unsigned long long, v);
    return __builtin_bit_cast(double, (unsigned long long)move(uint32(bits >> 32)) << 32 | move(uint32(bits)));
}
// By DPP: the operand of the next add, without LDS. clang does not turn shuffles into it.
template <int CONTROL>
struct Dpp {
    DEVICE_MEMBER uint32 operator()(uint32 v) const {
        return __builtin_amdgcn_update_dpp(0, v, CONTROL, 0xf, 0xf, true);
    }
};
struct OtherRow {  // lanes 0-15 and 16-31 change places
    DEVICE_MEMBER uint32 operator()(uint32 v) const {
#if defined(__GFX9__)
        return __builtin_amdgcn_ds_swizzle(v, 0x401f);  // GFX9 has no DPP for it
#else
        return __builtin_amdgcn_permlanex16(v, v, 0x76543210, 0xfedcba98, false, false);
#endif
    }
};
struct FromLane {
    int lane;
    DEVICE_MEMBER uint32 operator()(uint32 v) const { return __builtin_amdgcn_readlane(v, lane); }
};

// The sum over groups of WIDTH neighbouring lanes, in every lane. The mirrors pair other lanes than an xor would, but
// after the smaller steps all lanes of a group are equal.
constexpr int QUICK_SUM = 16;  // lanes whose sum is cheap: those that DPP reaches
template <int WIDTH, class T>
DEVICE T wave_sum(T v) {
    if constexpr (WIDTH > 1) v += moved(v, Dpp<0xb1>());   // quad_perm [1,0,3,2]
    if constexpr (WIDTH > 2) v += moved(v, Dpp<0x4e>());   // quad_perm [2,3,0,1]
    if constexpr (WIDTH > 4) v += moved(v, Dpp<0x141>());  // row_half_mirror
    if constexpr (WIDTH > 8) v += moved(v, Dpp<0x140>());  // row_mirror
    if constexpr (WIDTH == 32) v += moved(v, OtherRow());
    if constexpr (WIDTH == 64) {
        v = (moved(v, FromLane{0}) + moved(v, FromLane{16})) + (moved(v, FromLane{32}) + moved(v, FromLane{48}));
    }
    return v;
}

#endif

#if defined(__CUDACC__) || defined(__HIP_DEVICE_COMPILE__) || defined(RMSNORM_RAW_LANES)
// One memory access of COUNT elements, which must be aligned to it.
template <int COUNT, class T>
struct alignas(COUNT * sizeof(T)) Chunk {
    T at[COUNT];
};
template <int COUNT, class T>
DEVICE void copy(T* to, const T* from) {
    *reinterpret_cast<Chunk<COUNT, T>*>(to) = *reinterpret_cast<const Chunk<COUNT, T>*>(from);
}
#endif

// As copy, past L1.
template <int COUNT, class T>
DEVICE void copy_once(T* to, const T* from) {
#if defined(__CUDACC__)
    if constexpr (COUNT * sizeof(T) == 16) {
        *reinterpret_cast<uint4*>(to) = __ldcg(reinterpret_cast<const uint4*>(from));
        return;
    }
#endif
    copy<COUNT>(to, from);
}

// 16 bytes into shared memory some time before `fetched` returns, seen by this thread; zeros where they are not there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool COPIES_LATER = true;
DEVICE void copy_later(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32(__cvta_generic_to_shared(to))), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
DEVICE void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else
constexpr bool COPIES_LATER = false;
DEVICE void copy_later(void*, const void*, bool) {}
DEVICE void fetched() {}
#endif

// ---------------------------------------------------------------------------------------------- numbers

#if !defined(HAS_UPPER_HALVES)
DEVICE uint32 upper_halves(uint32 low, uint32 high) { return low >> 16 | (high & 0xffff0000u); }
#endif
// Nearest even by integers, in the upper half. This carries some NaNs to a number, unless their lower half is zero.
DEVICE uint32 bf16_of_number(float value) { return as_bits(value) + 0x7fff + (as_bits(value) >> 16 & 1); }
#if !defined(HAS_NARROW_BF16)
DEVICE uint32 bf16_of_any(float value) { return value != value ? 0x7fc00000 : bf16_of_number(value); }
DEVICE uint32 narrow_bf16(float low, float high) { return upper_halves(bf16_of_any(low), bf16_of_any(high)); }
constexpr bool CONVERTS_BF16 = false;
#else
constexpr bool CONVERTS_BF16 = true;
#endif

template <bool YES, class A, class B>
struct Select {
    typedef A type;
};
template <class A, class B>
struct Select<false, A, B> {
    typedef B type;
};

// What is computed and accumulated in: float, or double for float64 operands.
typedef Select<COMPUTE == F64, double, float>::type real;

// What arithmetic takes at a time: two floats where the card has instructions for two, else one value.
#if defined(HAS_PAIRS)
typedef Select<COMPUTE == F64, double, pair>::type wide;
#else
typedef real wide;
#endif
constexpr int WIDE = sizeof(wide) / sizeof(real);
constexpr int WIDES = PACK / WIDE;  // of a pack
DEVICE wide spread(real v) {
    wide all;
    UNROLL for (int i = 0; i < WIDE; ++i) reinterpret_cast<real*>(&all)[i] = v;
    return all;
}

// How an element lies in memory; NONE (an absent operand) only has to compile.
template <Dtype D>
struct Element {
    typedef real type;
};
template <>
struct Element<F16> {
    typedef uint16 type;
};
template <>
struct Element<BF16> {
    typedef uint16 type;
};
template <>
struct Element<F32> {
    typedef float type;
};
template <>
struct Element<F64> {
    typedef double type;
};
template <Dtype D>
using element = typename Element<D>::type;

template <Dtype D>
DEVICE real widen(element<D> stored) {
    if constexpr (D == F16) return widen_f16(stored);
    if constexpr (D == BF16) return as_float(uint32(stored) << 16);
    return stored;
}
template <Dtype D>
DEVICE element<D> narrow(real value) {
    if constexpr (D == F16) return narrow_f16(value, value);
    if constexpr (D == BF16) return narrow_bf16(value, value);
    return value;
}
// A rounding step of its own: the values that D would keep.
template <Dtype D>
DEVICE wide rounded(wide values) {
    real* const each = reinterpret_cast<real*>(&values);
    UNROLL for (int i = 0; i < WIDE; ++i) each[i] = widen<D>(narrow<D>(each[i]));
    return values;
}

// ---------------------------------------------------------------------------------------------- packs

// On a GPU two 16-bit elements share a 32-bit cell until they are used. As 16-bit values the compiler would take them
// apart at once, and so wait for a load that is meant to stay in flight.
template <Dtype D>
constexpr int PER_CELL = (D == F16 || D == BF16) && WAVE > 1 ? 2 : 1;
template <Dtype D>
using cell = typename Select<PER_CELL<D> == 2, uint32, element<D>>::type;

// Arithmetic hands on an operand's NaN or makes one of its own: where all operands are bf16, its lower half is zero.
// What comes in as fp32 beside them (rstd) has to be made so.
CONSTEXPR bool no_other_than_bf16(Dtype d) { return d == BF16 || d == NONE; }
constexpr bool ONLY_BF16 = no_other_than_bf16(X) && no_other_than_bf16(RESIDUAL) && no_other_than_bf16(WEIGHT) &&
                           no_other_than_bf16(BIAS) && no_other_than_bf16(DOUT) && no_other_than_bf16(DRESIDUAL_OUT) &&
                           !OFFSET_WEIGHT;
constexpr bool ROUNDS_NUMBERS = ONLY_BF16 && !CONVERTS_BF16;
DEVICE real plain_nan(real value) { return !ROUNDS_NUMBERS || value == value ? value : real(as_float(0x7fc00000)); }

// PACK neighbouring elements of a row, as stored: half the registers of floats where they are 16 bits wide.
template <Dtype D>
struct alignas(PACK * sizeof(element<D>) < 16 ? PACK * sizeof(element<D>) : 16) Pack {
    cell<D> at[PACK / PER_CELL<D>];
};
CONSTEXPR int smaller(int a, int b) { return a < b ? a : b; }

// Whether every pack of every thread lies inside its row.
constexpr bool EXACT =
    COLS == TILES * PACKS * THREADS_PER_ROW * PACK && (PACKS - KEPT) % BATCH == 0 && STASHED % BATCH == 0;
CONSTEXPR bool inside(int col, int cols) { return EXACT ? cols > 0 : col + PACK <= cols; }
constexpr bool WHOLE_PACKS = COLS > 0 && COLS % PACK == 0;
constexpr bool ROW_IN_REGISTERS = KEPT >= PACKS;

// On AMD a scalar base and a 32-bit offset in bytes make an address by themselves, where that is seen not to be
// negative.
template <class T>
DEVICE T* past(T* row, int col) {
    if constexpr (COLS == 0 || COLS >= 1 << 28) return row + col;
    return (T*)((char*)row + uint32(col) * uint32(sizeof(T)));
}

// The pack at column `col` of a row of `cols`; zeros beyond its end. Accesses are of VECTOR_OF elements, 16 bytes at
// most.
template <Dtype D, int VECTOR_OF = VECTOR, bool ONCE = false>
DEVICE Pack<D> load(const element<D>* row, int col, int cols) {
    constexpr int COUNT = smaller(VECTOR_OF, 16 / sizeof(element<D>)), CELL = PER_CELL<D>;
    Pack<D> pack;
    if (COUNT >= CELL && inside(col, cols)) {
        UNROLL for (int i = 0; i < PACK; i += COUNT) {
            const auto from = reinterpret_cast<const cell<D>*>(past(row, col) + i);
            if constexpr (ONCE) {
                copy_once<(COUNT + CELL - 1) / CELL>(&pack.at[i / CELL], from);
            } else {
                copy<(COUNT + CELL - 1) / CELL>(&pack.at[i / CELL], from);
            }
        }
    } else if (COUNT >= CELL && (WHOLE_PACKS || COLS == 0 || col >= cols)) {  // COLS 0: rows of padded partials
        UNROLL for (int i = 0; i < PACK / CELL; ++i) pack.at[i] = 0;
    } else {
        const auto get = [&](int i) LAMBDA { return col + i < cols ? row[col + i] : element<D>(0); };
        UNROLL for (int i = 0; i < PACK / CELL; ++i) {
            if constexpr (CELL == 2) {
                pack.at[i] = get(2 * i) | uint32(get(2 * i + 1)) << 16;
            } else {
                pack.at[i] = get(i);
            }
        }
    }
    return pack;
}

// What no other row needs: not to take the weight's place in L1.
template <Dtype D>
DEVICE Pack<D> load_once(const element<D>* row, int col, int cols) {
    return load<D, VECTOR, true>(row, col, cols);
}

// The same into shared memory, without a register on the way and without a wait, which `fetched` does.
template <Dtype D>
DEVICE void fetch(Pack<D>& to, const element<D>* row, int col, int cols) {
    constexpr int COUNT = smaller(VECTOR, 16 / sizeof(element<D>));
    if constexpr (COPIES_LATER && WHOLE_PACKS && COUNT * sizeof(element<D>) == 16) {
        const bool there = inside(col, cols);
        const element<D>* const from = there ? past(row, col) : row;
        UNROLL for (int i = 0; i < PACK; i += COUNT) {
            copy_later(reinterpret_cast<element<D>*>(&to) + i, from + i, there);
        }
    } else {
        to = load<D>(row, col, cols);
    }
}

template <Dtype D, int VECTOR_OF = VECTOR>
DEVICE void store(element<D>* row, int col, int cols, const Pack<D>& pack) {
    constexpr int COUNT = smaller(VECTOR_OF, 16 / sizeof(element<D>)), CELL = PER_CELL<D>;
    if (COUNT >= CELL && inside(col, cols)) {
        UNROLL for (int i = 0; i < PACK; i += COUNT) {
            copy<(COUNT + CELL - 1) / CELL>(reinterpret_cast<cell<D>*>(past(row, col) + i), &pack.at[i / CELL]);
        }
    } else if (COUNT < CELL || !WHOLE_PACKS) {
        UNROLL for (int i = 0; i < PACK; ++i) {
            if (col + i >= cols) continue;
            if constexpr (CELL == 2) {
                row[col + i] = element<D>(pack.at[i / 2] >> i % 2 * 16);
            } else {
                row[col + i] = pack.at[i];
            }
        }
    }
}

template <Dtype D>
DEVICE void unpack(const Pack<D>& pack, wide* to) {
    real* const values = reinterpret_cast<real*>(to);
    UNROLL for (int i = 0; i < PACK; ++i) {
        if constexpr (PER_CELL<D> == 1) {
            values[i] = widen<D>(pack.at[i]);
        } else if constexpr (D == BF16) {  // the high half is a float as it stands, but for the low one's bits
            values[i] = as_float(i % 2 ? pack.at[i / 2] & 0xffff0000u : pack.at[i / 2] << 16);
        } else {
            values[i] = widen<D>(element<D>(pack.at[i / 2] >> i % 2 * 16));
        }
    }
}
template <Dtype D>
DEVICE Pack<D> packed(const wide* from) {
    const real* const values = reinterpret_cast<const real*>(from);
    Pack<D> pack;
    UNROLL for (int i = 0; i < PACK / PER_CELL<D>; ++i) {
        if constexpr (PER_CELL<D> == 1) {
            pack.at[i] = narrow<D>(values[i]);
        } else if constexpr (D == F16) {
            pack.at[i] = narrow_f16(values[2 * i], values[2 * i + 1]);
        } else if constexpr (ROUNDS_NUMBERS) {  // without the test for NaN: half of the instructions
            pack.at[i] = upper_halves(bf16_of_number(values[2 * i]), bf16_of_number(values[2 * i + 1]));
        } else {
            pack.at[i] = narrow_bf16(values[2 * i], values[2 * i + 1]);
        }
    }
    return pack;
}

// The sign of a square: 0, which no compiler knows before it has the value.
DEVICE uint32 unknown_zero(real after) { return as_bits(float(after * after)) >> 31; }

// Makes the compiler unpack a pack again at its next use, instead of keeping the values in twice the registers.
template <Dtype D>
DEVICE void forget_values(Pack<D>& pack, uint32 zero) {
    UNROLL for (int i = 0; i < PACK / PER_CELL<D>; ++i) forget(pack.at[i], zero);
}

template <Dtype D>
DEVICE void settle_pack(Pack<D>& pack) {
    UNROLL for (int i = 0; i < PACK / PER_CELL<D>; ++i) settle(pack.at[i]);
}

// A pack as another dtype; the same one is left as it is.
template <Dtype TO, Dtype FROM>
DEVICE Pack<TO> converted(const Pack<FROM>& pack) {
    if constexpr (TO == FROM) {
        return pack;
    } else {
        wide values[WIDES];
        unpack<FROM>(pack, values);
        return packed<TO>(values);
    }
}

// ---------------------------------------------------------------------------------------------- rows

// Where a thread stands: its columns, its row in the block, and the block's rows. With per-head weights a block serves
// one head and counts that head's rows; row() gives the index in memory. A row may be shared out in TILES of columns.
struct Place {
    int first_col, row_in_block, head;
    int64 group;  // blocks of one group share rows, not columns
    int64 first, step, end;
    DEVICE_MEMBER int64 row(int64 i) const { return HEADS == 1 ? i : i * HEADS + head; }
    // The address form of past() is found inside one basic block only: here first_col is new to the compiler.
    DEVICE_MEMBER void renew() { settle(first_col); }
    DEVICE_MEMBER int col(int pack) const { return first_col + pack * (THREADS_PER_ROW * PACK); }
    DEVICE_MEMBER bool is_first_thread() const { return first_col == 0; }
};

// Whether a wave has one row, and the compiler knows.
constexpr bool ROWS_ARE_UNIFORM = HAS_UNIFORM && THREADS_PER_ROW % WAVE == 0;
DEVICE int row_in_block() {
    const int row = thread_index() / THREADS_PER_ROW;
    return ROWS_PER_BLOCK == 1 ? 0 : ROWS_ARE_UNIFORM ? uniform(row) : row;
}

DEVICE Place place(int64 rows, int blocks) {
    Place at;
    at.row_in_block = row_in_block();
    at.head = block_index() % HEADS;
    const int tile = block_index() / HEADS % TILES;
    at.first_col = (tile * PACKS * THREADS_PER_ROW + thread_index() % THREADS_PER_ROW) * PACK;
    at.group = block_index() / (HEADS * TILES);
    const int64 groups = blocks / (HEADS * TILES), count = rows / HEADS;
    if constexpr (INTERLEAVED) {  // neighbouring blocks read neighbouring rows
        at.first = at.group * ROWS_PER_BLOCK;
        at.step = groups * ROWS_PER_BLOCK;
        at.end = count;
    } else {  // one stretch of memory for each block
        const int64 share = (count + groups - 1) / groups;
        at.first = at.group * share;
        at.step = 1;
        at.end = at.first + share < count ? at.first + share : count;
    }
    return at;
}

// Long sums keep LANES accumulators a thread, and are folded every SECTION packs.
constexpr int ACCUMULATORS = LANES > WIDE ? LANES / WIDE : 1;
DEVICE real fold(const wide* lanes) {
    wide part[ACCUMULATORS];
    UNROLL for (int i = 0; i < ACCUMULATORS; ++i) part[i] = lanes[i];
    UNROLL for (int half = ACCUMULATORS / 2; half > 0; half /= 2) {
        UNROLL for (int i = 0; i < half; ++i) part[i] += part[i + half];
    }
    real total = reinterpret_cast<const real*>(part)[0];
    UNROLL for (int i = 1; i < WIDE; ++i) total += reinterpret_cast<const real*>(part)[i];
    return total;
}

CONSTEXPR int power_of_two_from(int n, int power = 1) { return power >= n ? power : power_of_two_from(n, 2 * power); }

// The sum over the threads of each row, in all of them: the one reduction of all kernels. One barrier: `turn`
// alternates between two sets of slots, so a slow wave still reads its own while a fast one writes the next row's.
DEVICE real row_sum(real v, int turn) {
    if constexpr (WAVES_PER_ROW == 1) {
        return wave_sum<THREADS_PER_ROW>(v);
    } else {
        // Of few waves the last sum takes in the rest of the wave's too.
        constexpr int GROUP = WAVES_PER_ROW * WAVE <= QUICK_SUM * QUICK_SUM ? QUICK_SUM : WAVE;
        constexpr int GROUPS = WAVES_PER_ROW * WAVE / GROUP, WIDTH = power_of_two_from(GROUPS);
        SHARED real scratch[2][ROWS_PER_BLOCK][GROUPS];
        const int thread = thread_index() % THREADS_PER_ROW;
        real* slots = scratch[turn & 1][row_in_block()];
        v = wave_sum<GROUP>(v);
        if (thread % GROUP == 0) slots[thread / GROUP] = v;
        sync();
        v = thread % WIDTH < GROUPS ? slots[thread % WIDTH] : real(0);
        return wave_sum<WIDTH>(v);
    }
}
