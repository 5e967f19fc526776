// This runs grpo/cuda/kernel.cu on a CPU. Include this file first, and compile with g++ -x c++.
//
// Every CUDA thread becomes a fiber, which is a function with a stack of its own that can stop in
// the middle. A lane is the number of a fiber in its warp. The 32 fibers of a warp run in turn,
// each until it returns or comes to a __shfl_*_sync or a __syncwarp. We call such a call an
// exchange. The lanes go on when all those that the mask names stand at the same call with the same
// mask. If some lane waits and none can go on, a GPU would hang or compute garbage. Then launch()
// returns false, and `fiber_error` says which lane waits for which. Blocks and warps run one after
// the other.
//
// With g++ -fsanitize=thread, the thread sanitizer sees each fiber as a thread. If two lanes of a
// warp use the same memory, at least one of them writes, and there is no __syncwarp in between, it
// reports this. It does not see such a race between two warps, because here the first has returned
// before the second begins.
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static       // One copy is enough, because blocks run in turn.

inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static struct { unsigned x; } threadIdx, blockIdx;
static char fiber_error[400];

inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }

#ifdef __SANITIZE_THREAD__
#define UNSEEN __attribute__((no_sanitize("thread")))
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void*, unsigned unordered);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#else
#define UNSEEN
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void __tsan_destroy_fiber(void*) {}
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#endif

const int WARP = 32, STACK = 1 << 16;

struct Fiber {
    ucontext_t context;     // where it starts
    jmp_buf place;          // where it stopped; setjmp is faster here than swapcontext
    enum { READY, WAITING, RETURNED } state;
    bool started;
    void* thread;           // the sanitizer's name for it
    const void* site;       // the place in the code of the call at which it waits
    unsigned mask;          // the lanes that take part in the exchange
    int source;             // the lane whose value it asks for
    unsigned long long value, answer;   // what it offers, and what it receives
};

static Fiber fibers[WARP];
static jmp_buf scheduler;
static void* main_thread;
static int lane_now;        // the number of the fiber that runs
static std::function<void()> body;

UNSEEN static void fiber_main() {
    body();
    fibers[lane_now].state = Fiber::RETURNED;
    __tsan_switch_to_fiber(main_thread, 0);
    _longjmp(scheduler, 1);
}

// Let a fiber run until it waits or returns.
UNSEEN static void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    __tsan_switch_to_fiber(fiber.thread, 1);
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// Every shuffle offers a value here, asks for the value of another lane, and waits. This function
// is never inlined, so its return address tells which call it is. The functions that call it are
// always inlined, so each place in kernel.cu that uses one of them is a different call.
template <class X>
UNSEEN __attribute__((noinline, noclone)) X exchange(unsigned mask, X value, int source) {
    Fiber& me = fibers[lane_now];
    me.state = Fiber::WAITING;
    me.site = __builtin_return_address(0);
    me.mask = mask;
    me.source = source;
    memcpy(&me.value, &value, sizeof(X));
    if (!_setjmp(me.place)) {
        __tsan_switch_to_fiber(main_thread, 1);
        _longjmp(scheduler, 1);
    }
    memcpy(&value, &fibers[lane_now].answer, sizeof(X));
    return value;
}

template <class X> __forceinline__ X __shfl_xor_sync(unsigned mask, X x, int bits) {
    return exchange(mask, x, lane_now ^ bits);
}
template <class X> __forceinline__ X __shfl_up_sync(unsigned mask, X x, int by, int width) {
    return exchange(mask, x, lane_now % width >= by ? lane_now - by : lane_now);
}
template <class X> __forceinline__ X __shfl_sync(unsigned mask, X x, int lane, int width) {
    return exchange(mask, x, lane_now / width * width + lane);
}
// A lane may rely on what another lane wrote only after this call, and not after a shuffle. So only
// here do we tell the thread sanitizer that what was written before comes before what is read
// after.
__forceinline__ void __syncwarp() {
    __tsan_release(fibers);
    exchange(0xffffffffu, 0, lane_now);
    __tsan_acquire(fibers);
}

// Find a lane that keeps `lane` waiting, or -1 if `lane` can go on. The mask of `lane` must name
// `lane` itself and the lane whose value it asks for. All lanes of the mask must stand at the same
// call as `lane`, with the same mask.
UNSEEN static int missing(int lane) {
    const Fiber& me = fibers[lane];
    if (!(me.mask >> lane & 1)) return lane;
    if (!(me.mask >> me.source & 1)) return me.source;
    for (int l = 0; l < WARP; l++) {
        const Fiber& other = fibers[l];
        const bool here = other.state == Fiber::WAITING && other.site == me.site;
        if (me.mask >> l & 1 && !(here && other.mask == me.mask)) return l;
    }
    return -1;
}

UNSEEN static bool run_warp() {
    for (;;) {
        for (int l = 0; l < WARP; l++) {
            lane_now = l;
            threadIdx.x = threadIdx.x / WARP * WARP + l;
            if (fibers[l].state == Fiber::READY) resume(fibers[l]);
        }
        int stuck = -1;
        std::vector<int> ready;         // Find them all before the state of any changes.
        for (int l = 0; l < WARP; l++)
            if (fibers[l].state != Fiber::WAITING) continue;
            else if (missing(l) < 0) ready.push_back(l);
            else stuck = l;
        for (int l : ready) {
            fibers[l].answer = fibers[fibers[l].source].value;
            fibers[l].state = Fiber::READY;
        }
        if (!ready.empty()) continue;
        if (stuck < 0) return true;                         // all have returned
        const int m = missing(stuck);
        const char* how = fibers[m].state == Fiber::RETURNED ? "has returned" : "is elsewhere";
        snprintf(fiber_error, sizeof fiber_error,
                 "divergent or partial exchange: in block %u lane %d waits for the lanes of mask "
                 "%08x, lane %d %s", blockIdx.x, stuck, fibers[stuck].mask, m, how);
        return false;
    }
}

// Launch a kernel as cuLaunchKernel does. `arguments` has a pointer to the value of each argument.
// The blocks before number `first` are left out.
template <class... P>
UNSEEN bool launch(void (*kernel)(P...), unsigned blocks, unsigned threads, void** arguments,
                   unsigned first = 0) {
    static char stacks[WARP][STACK];
    main_thread = __tsan_get_current_fiber();
    auto call = [&]<size_t... I>(std::index_sequence<I...>) { kernel(*(P*)arguments[I]...); };
    body = [&] { call(std::index_sequence_for<P...>{}); };
    for (blockIdx.x = first; blockIdx.x < blocks; blockIdx.x++)
        for (unsigned warp = 0; warp < threads / WARP; warp++) {
            threadIdx.x = warp * WARP;
            for (int l = 0; l < WARP; l++) {
                fibers[l] = {};
                fibers[l].thread = __tsan_create_fiber(0);
                getcontext(&fibers[l].context);
                fibers[l].context.uc_stack = {stacks[l], 0, STACK};
                makecontext(&fibers[l].context, fiber_main, 0);
            }
            if (!run_warp()) return false;
            for (Fiber& fiber : fibers) __tsan_destroy_fiber(fiber.thread);
        }
    return true;
}
