// A GPU made of fibres, as a kernel's text sees it: what prelude.h's lanes branch stands on.
//
// Knows:    the primitives, and what each cross-lane instruction moves (CUDA's and the AMD ISA manuals' words).
//           The compiler includes it in front of the program (-include); LANES_NVIDIA or LANES_AMD: whose text runs.
// Must not: know kernels, or schedule: machine.cpp runs the fibres and checks where they meet.

#define DEVICE static inline __attribute__((always_inline))
#define DEVICE_MEMBER __attribute__((always_inline))
#define LAMBDA __attribute__((always_inline))
#define CONSTEXPR constexpr
#define KERNEL extern "C" void
#define UNROLL
#define ROLLED
#if defined(__SANITIZE_THREAD__)
#define SHARED static __thread  // blocks run beside each other, one in each thread
#else
#define SHARED static __attribute__((section("lanes_shared")))  // one place to poison
#endif

// The running fibre's, set at each switch. __thread needs no guard, as thread_local would.
extern "C" __thread int lanes_thread, lanes_lane, lanes_block;

// Both give the processor away until the others have come; the return address tells the place in the kernel.
extern "C" void lanes_barrier();
// Every lane of the wave brings a value and leaves with that of lane `source` (with its own where that is -1).
// `operand`: what the instruction holds as a constant or in a scalar register, so the same in all lanes.
extern "C" unsigned long long lanes_exchange(unsigned long long value, int source, int operand);
extern "C" void lanes_refuse(const char* why);  // an instruction that this device does not have

DEVICE int thread_index() { return lanes_thread; }
DEVICE int block_index() { return lanes_block; }
DEVICE void sync() { lanes_barrier(); }
template <class T>
DEVICE void settle(T&) {}
DEVICE float as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
DEVICE unsigned as_bits(float value) { return __builtin_bit_cast(unsigned, value); }
DEVICE float madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double madd(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE float inverse_sqrt(float v) { return 1.0f / __builtin_sqrtf(v); }
DEVICE double inverse_sqrt(double v) { return 1.0 / __builtin_sqrt(v); }
DEVICE float widen_f16(unsigned short bits) { return __builtin_bit_cast(_Float16, bits); }
DEVICE unsigned narrow_f16(float low, float high) {
    return __builtin_bit_cast(unsigned short, (_Float16)low) |
           unsigned(__builtin_bit_cast(unsigned short, (_Float16)high)) << 16;
}

#if defined(LANES_NVIDIA)

DEVICE void forget(unsigned& v, unsigned zero) { v ^= zero; }
DEVICE void forget(float& v, unsigned zero) { v = as_float(as_bits(v) ^ zero); }
DEVICE void forget(double&, unsigned) {}
constexpr bool HAS_UNIFORM = false;
DEVICE int uniform(int v) { return v; }

template <class T>
DEVICE T __shfl_xor_sync(unsigned mask, T v, int lane_mask) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof(T));
    if (mask != 0xffffffffu) lanes_refuse("a shuffle whose mask is not the whole wave");
    bits = lanes_exchange(bits, lanes_lane ^ lane_mask, lane_mask);
    __builtin_memcpy(&v, &bits, sizeof(T));
    return v;
}

#else  // LANES_AMD; __GFX9__ (wave 64) is defined as clang does for such a device

template <class T>
DEVICE void forget(T&, unsigned) {}

// The lane that a DPP control names for this lane, -1 outside of its row (of 16) or of the wave.
DEVICE int dpp_source(int control) {
    const int lane = lanes_lane, row = lane & ~15, in_row = lane & 15, count = control & 15;
    if (control <= 0xff) return (lane & ~3) | (control >> 2 * (lane & 3) & 3);                // quad_perm
    if (control > 0x100 && control <= 0x10f) return in_row + count < 16 ? lane + count : -1;  // row_shl
    if (control > 0x110 && control <= 0x11f) return in_row >= count ? lane - count : -1;      // row_shr
    if (control > 0x120 && control <= 0x12f) return row | ((in_row - count) & 15);            // row_ror
    if (control == 0x140) return row | (15 - in_row);                                         // row_mirror
    if (control == 0x141) return lane ^ 7;                                                    // row_half_mirror
#if defined(__GFX9__)
    if (control == 0x142) return row ? row - 1 : -1;    // row_bcast:15
    if (control == 0x143) return lane >= 32 ? 31 : -1;  // row_bcast:31
#else
    if (control >= 0x150 && control <= 0x15f) return row | count;             // row_share
    if (control >= 0x160 && control <= 0x16f) return row | (in_row ^ count);  // row_xmask
#endif
    lanes_refuse("a DPP control that this device does not have, or lanes.h has not");
    return -1;
}
DEVICE unsigned __builtin_amdgcn_update_dpp(unsigned old, unsigned v, int control, int rows, int banks, bool bound) {
    const int source = dpp_source(control);
    const unsigned got = lanes_exchange(v, source, control);
    if (!(rows >> lanes_lane / 16 & 1) || !(banks >> lanes_lane % 16 / 4 & 1)) return old;
    return source >= 0 ? got : bound ? 0 : old;
}
DEVICE unsigned __builtin_amdgcn_readlane(unsigned v, int lane) { return lanes_exchange(v, lane, lane); }
constexpr bool HAS_UNIFORM = true;
DEVICE int uniform(int v) { return lanes_exchange(v, 0, 0); }           // a value that differs is the first lane's
DEVICE unsigned __builtin_amdgcn_ds_swizzle(unsigned v, int pattern) {  // bit-mask mode: in groups of 32 lanes
    if (pattern & 0x8000) lanes_refuse("a ds_swizzle mode that is not written here");
    const int in_group = ((lanes_lane & pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
    return lanes_exchange(v, (lanes_lane & 32) | in_group, pattern);
}
#if !defined(__GFX9__)
// From the other row of 16 in each 32: the lane there that this lane's nibble of `low`, `high` names.
DEVICE unsigned __builtin_amdgcn_permlanex16(unsigned, unsigned v, unsigned low, unsigned high, bool, bool) {
    const int nibble = (lanes_lane & 8 ? high : low) >> 4 * (lanes_lane & 7) & 15;
    return lanes_exchange(v, ((lanes_lane & ~15) ^ 16) | nibble, int(low ^ high));
}
#endif

#endif

// ENTRY(kernel): one thread's run of the kernel, from the packed arguments that a launch takes.
struct Arguments {
    const char* at;
    unsigned long offset;
    template <class T>
    T take() {
        T value;
        offset = (offset + alignof(T) - 1) / alignof(T) * alignof(T);
        __builtin_memcpy(&value, at + offset, sizeof(T));
        offset += sizeof(T);
        return value;
    }
};
template <class... All>
struct Call {
    Call(void (*kernel)(All...), All... arguments) { kernel(arguments...); }
};
template <class... All>
static void call(void (*kernel)(All...), Arguments arguments) {
    Call<All...>{kernel, arguments.take<All>()...};  // braces: taken from left to right
}
#define ENTRY(kernel)                                                                                             \
    extern "C" {                                                                                                  \
    extern const int lanes_threads = THREADS, lanes_wave = WAVE;                                                  \
    extern const unsigned short lanes_poison = COMPUTE == F64 ? 0x7ff4 : 0x7fa0; /* repeated: a signalling NaN */ \
    void lanes_kernel(const char* arguments) { call(kernel, {arguments, 0}); }                                    \
    }
