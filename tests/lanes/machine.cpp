// The machine: runs a grid, each GPU thread a fibre with its own stack, and checks what a GPU would not tell.
//
// Knows:    blocks, waves, barriers, memory with guard zones. Reads one launch from stdin (the format is machine.py's
//           `run`), writes the outputs to stdout, and a fault with its code addresses to stderr.
// Must not: know kernels, or be built with a sanitizer itself: only the kernel's own accesses count.
//
// Faults:   threads of a block at different barriers, or gone; lanes missing from a shuffle; arithmetic on poison (what
//           nobody has written); accesses outside of the arguments. With the sanitizers also shared memory's bounds,
//           alignment, and races: there a barrier is the only thing that orders two threads of a block.

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <vector>

#if !defined(__x86_64__)
#error "tests/lanes switches stacks on x86-64 only"
#endif

extern "C" {
__thread int lanes_thread, lanes_lane, lanes_block;
extern const int lanes_threads, lanes_wave;
extern const unsigned short lanes_poison;
void lanes_kernel(const char* arguments);
void lanes_barrier();
unsigned long long lanes_exchange(unsigned long long value, int source, int operand);
void lanes_refuse(const char* why);
extern unsigned short __start_lanes_shared[] __attribute__((weak)), __stop_lanes_shared[] __attribute__((weak));
}

// ------------------------------------------------------------------------------------------------ ThreadSanitizer

#if defined(LANES_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fibre);
void __tsan_switch_to_fiber(void* fibre, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
}
static void* sanitizer_fibre() { return __tsan_create_fiber(0); }
static void sanitizer_switch(void* fibre) { __tsan_switch_to_fiber(fibre, 1); }  // 1: a switch orders nothing
#else
static void* __tsan_get_current_fiber() { return nullptr; }
static void* sanitizer_fibre() { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void sanitizer_switch(void*) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

// ------------------------------------------------------------------------------------------------ fibres

constexpr size_t PAGE = 4096, STACK = 64 * PAGE;

enum State { READY, EXCHANGES, AT_BARRIER, ENDED };

struct Fibre {
    void* stack_pointer;  // while it does not run
    void* shadow;         // ThreadSanitizer's
    State state;
    const void* site;  // the code address at which it gave the processor away
    unsigned long long value;
    int thread, source, operand;
};

struct Block {
    std::vector<Fibre> fibres;
    std::mt19937 random;
    void *stack_pointer, *shadow;  // the scheduler's
    // Two objects: with one, a thread that leaves a barrier late would also see what others did after it.
    char arrive, depart;
};

static char* arguments;
static char grid_end;
static __thread Block* block;
static __thread Fibre* running;

// Saves what a callee must keep, changes stacks, and goes on where the other one stopped.
extern "C" void lanes_switch(void** save, void* load);
asm(R"(
    .pushsection .text
lanes_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .popsection
)");

static void give_away(State state) {
    running->state = state;
    sanitizer_switch(block->shadow);
    lanes_switch(&running->stack_pointer, block->stack_pointer);
}

static void fibre_main() {
    lanes_kernel(arguments);
    __tsan_release(&grid_end);
    give_away(ENDED);
}

static void resume(Fibre& fibre) {
    running = &fibre;
    lanes_thread = fibre.thread;
    lanes_lane = fibre.thread % lanes_wave;
    sanitizer_switch(fibre.shadow);
    lanes_switch(&block->stack_pointer, fibre.stack_pointer);
}

static void reset(Fibre& fibre, int thread, char* stack) {
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack + STACK) - 1;  // aligned as a call leaves it; 0 returns nowhere
    *--top = reinterpret_cast<uintptr_t>(fibre_main);
    fibre = Fibre{top - 6, sanitizer_fibre(), READY, nullptr, 0, thread, 0, 0};
}

// ------------------------------------------------------------------------------------------------ faults

static void describe(const Fibre& fibre) {
    static const char* const doing[] = {"runs", "shuffles", "waits at a barrier", "has ended"};
    fprintf(stderr, "  thread %d (lane %d of wave %d) %s", fibre.thread, fibre.thread % lanes_wave,
            fibre.thread / lanes_wave, doing[fibre.state]);
    // The address of a return lies behind its call.
    if (fibre.state != ENDED) fprintf(stderr, " pc=%p", static_cast<const char*>(fibre.site) - 1);
    fprintf(stderr, "\n");
}

[[noreturn]] static void fault(const char* what, const Fibre& a, const Fibre& b) {
    fprintf(stderr, "FAULT in block %d: %s\n", lanes_block, what);
    describe(a);
    if (&a != &b) describe(b);
    fflush(stderr);
    _exit(70);
}

extern "C" void lanes_refuse(const char* why) {
    running->site = __builtin_return_address(0);
    fault(why, *running, *running);
}

// ------------------------------------------------------------------------------------------------ where threads meet

extern "C" void lanes_barrier() {
    running->site = __builtin_return_address(0);
    __tsan_release(&block->arrive);
    give_away(AT_BARRIER);
    __tsan_acquire(&block->depart);
}

extern "C" unsigned long long lanes_exchange(unsigned long long value, int source, int operand) {
    running->site = __builtin_return_address(0);
    running->value = value;
    running->source = source;
    running->operand = operand;
    give_away(EXCHANGES);
    return running->value;
}

static std::vector<Fibre*> shuffled(Fibre* first, Fibre* last, int step) {
    std::vector<Fibre*> order;
    for (Fibre* fibre = first; fibre < last; fibre += step) order.push_back(fibre);
    std::shuffle(order.begin(), order.end(), block->random);
    return order;
}

// Runs a wave from shuffle to shuffle, until its lanes wait at barriers or have ended.
static void run_wave(Fibre* first, Fibre* last) {
    std::vector<unsigned long long> values;
    for (;;) {
        for (Fibre* fibre : shuffled(first, last, 1)) {
            if (fibre->state == READY) resume(*fibre);
        }
        Fibre* one = std::find_if(first, last, [](const Fibre& fibre) { return fibre.state == EXCHANGES; });
        if (one == last) return;
        values.clear();
        for (Fibre* fibre = first; fibre < last; ++fibre) {
            if (fibre->state != EXCHANGES) fault("lanes are missing from a shuffle", *one, *fibre);
            if (fibre->site != one->site) fault("lanes of a wave are in different shuffles", *one, *fibre);
            if (fibre->operand != one->operand) fault("lanes of a shuffle disagree about its pattern", *one, *fibre);
            if (fibre->source >= last - first) fault("a shuffle reads a lane that is not there", *fibre, *fibre);
            values.push_back(first[fibre->source < 0 ? fibre - first : fibre->source].value);
        }
        for (Fibre* fibre = first; fibre < last; ++fibre) {
            fibre->value = values[fibre - first];
            fibre->state = READY;
        }
    }
}

static void run_block(int index, int seed, char* stacks) {
    Block here{};
    block = &here;
    here.random.seed(seed + index);
    here.shadow = __tsan_get_current_fiber();
    lanes_block = index;
    std::fill(__start_lanes_shared, __stop_lanes_shared, lanes_poison);
    here.fibres.resize(lanes_threads);
    Fibre *first = here.fibres.data(), *last = first + lanes_threads;
    for (int i = 0; i < lanes_threads; ++i) reset(first[i], i, stacks + i * (PAGE + STACK) + PAGE);
    for (;;) {
        for (Fibre* wave : shuffled(first, last, lanes_wave)) run_wave(wave, std::min(wave + lanes_wave, last));
        for (const Fibre* fibre = first; fibre < last; ++fibre) {
            if (fibre->state != first->state) fault("threads have ended before a barrier", *first, *fibre);
            if (fibre->site != first->site && fibre->state != ENDED)
                fault("threads of a block wait at different barriers", *first, *fibre);
        }
        if (first->state == ENDED) break;
        __tsan_acquire(&here.arrive);
        __tsan_release(&here.depart);
        for (Fibre& fibre : here.fibres) fibre.state = READY;
    }
    for (Fibre& fibre : here.fibres) __tsan_destroy_fiber(fibre.shadow);
}

static char* make_stacks() {  // a page without access below each
    const size_t size = lanes_threads * (PAGE + STACK);
    char* stacks =
        static_cast<char*>(mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int i = 0; i < lanes_threads; ++i) mprotect(stacks + i * (PAGE + STACK) + PAGE, STACK, PROT_READ | PROT_WRITE);
    return stacks;
}

// ------------------------------------------------------------------------------------------------ memory

struct Buffer {  // as it comes in; its content follows
    char name[24];
    int64_t size;
    int32_t offset;  // of its start from a multiple of 16
    int32_t output;
    char *start, *zone, *zone_end;  // guard bytes are what lies in the zone and not in the buffer
};
static std::vector<Buffer> buffers;
constexpr char GUARD = 0x5a;

// Ends less than 16 bytes before a page without access, so that even reads beyond it are seen.
static void allocate(Buffer& buffer) {
#if defined(LANES_ASAN)
    char* start = static_cast<char*>(malloc(buffer.offset + buffer.size));
    buffer.start = start + buffer.offset;
    buffer.zone = start;
    buffer.zone_end = buffer.start + buffer.size;
    memset(start, GUARD, buffer.offset);
#else
    const size_t body = (buffer.size + 16 + PAGE - 1) / PAGE * PAGE;
    char* pages = static_cast<char*>(mmap(nullptr, body + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    buffer.zone = pages + PAGE;
    buffer.zone_end = buffer.zone + body;
    mprotect(buffer.zone, body, PROT_READ | PROT_WRITE);
    memset(buffer.zone, GUARD, body);
    const size_t last = body - buffer.size;
    buffer.start = buffer.zone + (last - (last - buffer.offset) % 16);
#endif
}

static void check_guards(int index) {
    for (const Buffer& buffer : buffers) {
        for (const char* at = buffer.zone; at < buffer.zone_end; ++at) {
            if (at == buffer.start) at += buffer.size;
            if (at == buffer.zone_end || *at == GUARD) continue;
            fprintf(stderr, "FAULT: block %d wrote outside of %s: at byte %ld of %ld\n", index, buffer.name,
                    long(at - buffer.start), long(buffer.size));
            _exit(70);
        }
    }
}

static void on_signal(int number, siginfo_t* info, void* context) {
    const auto pc = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
    fprintf(stderr, "FAULT in block %d: thread %d: %s pc=0x%llx\n", lanes_block, lanes_thread,
            number == SIGFPE ? "arithmetic on poison, which is memory that nobody has written" : "bad access",
            static_cast<unsigned long long>(pc));
    for (const Buffer& buffer : buffers) {
        const char* address = static_cast<char*>(info->si_addr);
        if (number != SIGFPE && address >= buffer.zone - PAGE && address < buffer.zone_end + PAGE)
            fprintf(stderr, "  at byte %ld of %s, which has %ld\n", long(address - buffer.start), buffer.name,
                    long(buffer.size));
    }
    fflush(stderr);
    _exit(70);
}

static void catch_signals() {
    static char stack[16 * PAGE];
    stack_t own{};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGFPE, &action, nullptr);
#if !defined(LANES_ASAN)  // which has more to say
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
#endif
}

// ------------------------------------------------------------------------------------------------ one launch

static void read_exactly(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) {
        fprintf(stderr, "the launch on stdin ends early\n");
        _exit(71);
    }
}

struct Launch {
    int32_t blocks, seed, argument_bytes, places, buffers;
};
struct Place {  // where a buffer's address goes in the arguments
    int32_t offset, buffer;
};
static Launch launch;

#if defined(LANES_TSAN)
static void run_grid() {
    std::vector<pthread_t> threads(launch.blocks);
    const auto run = [](void* index) -> void* {
        run_block(int(reinterpret_cast<intptr_t>(index)), launch.seed, make_stacks());
        return nullptr;
    };
    for (int i = 0; i < launch.blocks; ++i)
        pthread_create(&threads[i], nullptr, run, reinterpret_cast<void*>(intptr_t(i)));
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
}
#else
static void run_grid() {
    const unsigned all_but_invalid = 0x1f80 & ~0x0080u;  // arithmetic on a signalling NaN stops the program
    asm volatile("ldmxcsr %0" : : "m"(all_but_invalid));
    std::vector<int> order(launch.blocks);
    for (int i = 0; i < launch.blocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(launch.seed));
    char* stacks = make_stacks();
    for (int index : order) {
        run_block(index, launch.seed, stacks);
        check_guards(index);
    }
    const unsigned usual = 0x1f80;
    asm volatile("ldmxcsr %0" : : "m"(usual));
}
#endif

int main() {
    read_exactly(&launch, sizeof launch);
    arguments = static_cast<char*>(malloc(launch.argument_bytes));
    read_exactly(arguments, launch.argument_bytes);
    std::vector<Place> places(launch.places);
    read_exactly(places.data(), places.size() * sizeof(Place));
    buffers.resize(launch.buffers);
    for (Buffer& buffer : buffers) {
        read_exactly(&buffer, offsetof(Buffer, start));
        allocate(buffer);
        read_exactly(buffer.start, buffer.size);
#if !defined(LANES_ASAN)
        if (!buffer.output) mprotect(buffer.zone, buffer.zone_end - buffer.zone, PROT_READ);
#endif
    }
    for (const Place& place : places) memcpy(arguments + place.offset, &buffers[place.buffer].start, sizeof(char*));
    catch_signals();
    run_grid();
    __tsan_acquire(&grid_end);
    for (const Buffer& buffer : buffers) {
        if (buffer.output) fwrite(buffer.start, 1, buffer.size, stdout);
    }
    return 0;
}
