// The two operations of grpo/sampling.py and grpo/stats.py, each fused into one pass over the logits.
//
// Letters: B masked inputs, T characters, G group size, V vocabulary. A *row* is one of the B*T positions: V logits.
//
// How to read CUDA. Each function marked __global__ is run by thousands of threads at once, and every thread runs the same text with another
// threadIdx.x. 32 neighbouring threads are a warp, and a thread's place in it is its lane. Here a row is shared by LANES neighbouring lanes, its team,
// so that a small vocabulary does not leave most of a warp idle; LAYOUTS in grpo/kernel.py says how many lanes, and how many columns each (PER).
//
// Columns are dealt out like cards: a lane holds columns lane, lane + LANES, lane + 2 * LANES, ... in its own registers, so that neighbouring lanes
// always read neighbouring addresses. Columns past V are dealt too, as characters that cannot occur.
//
// What the lanes of a team know together they learn by __shfl_xor_sync(team, x, d): "give me the x of the lane whose number differs from mine in the
// bits of d". All lanes named in `team` must arrive at the same call. They do: everything that decides which calls are made (is the row a blank? which
// settings are on?) is the same for the whole team, and a row that is not a blank writes its zeros and leaves with its whole team before the first exchange.
//
// There is no shared memory and there are no atomics: every sum has one order, hence the same bits in every run.

struct bf16 { unsigned short bits; };   // the upper half of a float: same exponent, 8 bits of mantissa

const int THREADS = 128;                // to a block; grpo/kernel.py launches with the same number

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ inline float number(float x) { return x; }
__device__ inline float number(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(bf16* to, float x) {   // to the nearest bf16, and of two equally near to the even one
    const unsigned u = __float_as_uint(x);
    to->bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

template <int LANES> __device__ inline long long row_of_this_thread() {
    return (long long)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
}

template <int LANES> __device__ inline unsigned team_of_this_thread() {   // one bit for each lane that shares the row
    return (0xffffffffu >> (32 - LANES)) << (threadIdx.x % 32 / LANES * LANES);
}

// Adds each of N numbers over the team: after exchanges at distance LANES/2, ..., 2, 1 every lane holds the same N totals.
template <int LANES, int N, class X> __device__ __forceinline__ void team_sum(X (&x)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int n = 0; n < N; n++) x[n] += __shfl_xor_sync(team_of_this_thread<LANES>(), x[n], distance);
}

template <int LANES, int N> __device__ __forceinline__ void team_max(float (&x)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int n = 0; n < N; n++) x[n] = fmaxf(x[n], __shfl_xor_sync(team_of_this_thread<LANES>(), x[n], distance));
}

// ---------------------------------------------------------------------------------------------------------------------
// stats: log q of each drawn character, exact KL and entropy of each blank. Equations in grpo/stats.py.
//
// With z the logits, r those of the reference, x = (z - max z) / temperature and Z = sum of exp(x):
//     log p = x - log Z        log q = log p - log p(S)        KL = sum p (x - x_r) - log Z + log Z_r        H = log Z - sum p x
// Subtracting the maximum first keeps exp from overflowing, and costs no accuracy however large the logits are.
// `norms` (B,T,5) keeps {max z, log Z, log p(S), max r, log Z_r} for the backward pass, which then needs no exchange at all.

template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS) stats_forward(
        const Number* __restrict__ logits, const Number* __restrict__ ref_logits, const long long* __restrict__ completions, const bool* __restrict__ kept,
        const bool* __restrict__ mask, float* __restrict__ logp, float* __restrict__ ref_logp, float* __restrict__ kl, float* __restrict__ entropy,
        float* __restrict__ norms, int B, int T, int G, int V, double temperature) {
    const int lane = threadIdx.x % LANES;
    const long long row = row_of_this_thread<LANES>();
    if (row >= (long long)B * T) return;
    const long long first = row / T * G * T + row % T;   // completion 0 of this row in (B,G,T); completion j lies j * T further
    if (!mask[row]) {
        for (int j = lane; j < G; j += LANES) logp[first + (long long)j * T] = ref_logp[first + (long long)j * T] = 0;
        for (int n = lane; n < 5; n += LANES) norms[row * 5 + n] = 0;
        if (lane == 0) kl[row] = entropy[row] = 0;
        return;
    }
    // Read the row, once, and find the largest logit: of all characters, and of those in S.
    const float scale = 1 / (float)temperature;
    float z[PER], r[PER], top[4] = {minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()};
    unsigned in_s = 0;                                   // bit i: column lane + i * LANES is in S
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = lane + i * LANES;
        z[i] = v < V ? number(logits[row * V + v]) : minus_infinity();
        r[i] = v < V ? number(ref_logits[row * V + v]) : minus_infinity();
        const bool keep = v < V && kept[row * V + v];
        in_s |= (unsigned)keep << i;
        top[0] = fmaxf(top[0], z[i]);
        top[1] = fmaxf(top[1], r[i]);
        top[2] = fmaxf(top[2], keep ? z[i] : minus_infinity());
        top[3] = fmaxf(top[3], keep ? r[i] : minus_infinity());
    }
    team_max<LANES>(top);
    const float top_s = (top[2] - top[0]) * scale, ref_top_s = (top[3] - top[1]) * scale;
    // S is summed from its own maximum: the reference may find all of S so unlikely that exp(x) is 0 throughout.
    float sum[6] = {0, 0, 0, 0, 0, 0};                   // Z, Z_r, the same over S, sum of p (x - x_r), sum of p x
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const float x = (z[i] - top[0]) * scale, x_r = (r[i] - top[1]) * scale, p = expf(x);   // p is yet to be divided by Z
        sum[0] += p;
        sum[1] += expf(x_r);
        if (in_s >> i & 1) {
            sum[2] += expf(x - top_s);
            sum[3] += expf(x_r - ref_top_s);
        }
        if (p > 0) {                                     // 0 log 0 = 0, though x is -inf
            sum[4] += p * (x - x_r);
            sum[5] += p * x;
        }
    }
    team_sum<LANES>(sum);
    const float log_z = logf(sum[0]), ref_log_z = logf(sum[1]);
    const float log_s = top_s + logf(sum[2]) - log_z, ref_log_s = ref_top_s + logf(sum[3]) - ref_log_z;   // log p(S), log r(S)

    if (lane == 0) {
        kl[row] = sum[4] / sum[0] - log_z + ref_log_z;
        entropy[row] = log_z - sum[5] / sum[0];
        const float norm[5] = {top[0], log_z, log_s, top[1], ref_log_z};
        for (int n = 0; n < 5; n++) norms[row * 5 + n] = norm[n];
    }
    for (int j = lane; j < G; j += LANES) {              // the lanes share out the completions; the row is still in the cache
        const long long at = first + (long long)j * T, v = completions[at];
        float x = __uint_as_float(0x7fc00000u), x_r = x; // NaN, for a character that is not in the vocabulary
        if (0 <= v && v < V) {
            const bool keep = kept[row * V + v];
            x = keep ? (number(logits[row * V + v]) - top[0]) * scale : minus_infinity();
            x_r = keep ? (number(ref_logits[row * V + v]) - top[1]) * scale : minus_infinity();
        }
        logp[at] = x - log_z - log_s;
        ref_logp[at] = x_r - ref_log_z - ref_log_s;
    }
}

// dz[v] = 1/temperature ( sum_j g_logp[j] (1[v = y_j] - q[v])  +  g_kl p[v] (log p[v] - log r[v] - KL)  -  g_entropy p[v] (log p[v] + H) )
template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS) stats_backward(
        const float* __restrict__ g_logp, const float* __restrict__ g_kl, const float* __restrict__ g_entropy, const Number* __restrict__ logits,
        const Number* __restrict__ ref_logits, const long long* __restrict__ completions, const bool* __restrict__ kept, const bool* __restrict__ mask,
        const float* __restrict__ kl, const float* __restrict__ entropy, const float* __restrict__ norms, Number* __restrict__ g_logits,
        int B, int T, int G, int V, double temperature) {
    const int lane = threadIdx.x % LANES;
    const long long row = row_of_this_thread<LANES>();
    if (row >= (long long)B * T) return;
    if (!mask[row]) {
        for (int v = lane; v < V; v += LANES) store(g_logits + row * V + v, 0);
        return;
    }
    // Every lane walks through all completions, in order, and picks up the gradients that belong to its own columns. (One
    // step per completion would be an array indexed by v: but registers have no address, and the sums must keep an order.)
    const long long first = row / T * G * T + row % T;
    float drawn[PER] = {}, total = 0;                    // sum_j g_logp[j] 1[v = y_j] of each column, sum_j g_logp[j]
    for (int j = 0; j < G; j++) {
        const long long at = first + (long long)j * T, y = completions[at];
        const int column = 0 <= y && y < V ? (int)y : -1;
        const float g = g_logp[at];
        total += g;
        #pragma unroll
        for (int i = 0; i < PER; i++)
            if (column == lane + i * LANES) drawn[i] += g;
    }

    const float scale = 1 / (float)temperature, gk = g_kl[row], gh = g_entropy[row], kl_row = kl[row], h_row = entropy[row];
    const float top = norms[row * 5], log_z = norms[row * 5 + 1], log_s = norms[row * 5 + 2];
    const float ref_top = norms[row * 5 + 3], ref_log_z = norms[row * 5 + 4];
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = lane + i * LANES;
        if (v < V) {
            const float log_p = (number(logits[row * V + v]) - top) * scale - log_z, p = expf(log_p);
            const float log_r = (number(ref_logits[row * V + v]) - ref_top) * scale - ref_log_z;
            float d = drawn[i];
            if (kept[row * V + v]) d -= total * expf(log_p - log_s);
            if (p != 0)                                  // 0 log 0 = 0; NaN is not 0, so that a broken row shows
                d += p * (gk * (log_p - log_r - kl_row) - gh * (log_p + h_row));
            store(g_logits + row * V + v, d * scale);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// sample_completions: which characters may be drawn, and the draws. Whole numbers throughout, as grpo/sampling.py says.
//
// top-k, top-p and min-p all drop what is lighter than some threshold, so the kept set is one number: the least weight kept.

// The largest threshold such that the characters of at least that weight still number `enough`, or weigh `enough` together.
// Found from its highest bit down: a bit is set whenever the characters that remain are still enough. (top-p need not leave
// out what top-k has dropped: that is lighter, and counted only where the heavier ones are enough already.)
template <int LANES, int PER>
__device__ __forceinline__ unsigned largest_threshold(const unsigned (&weight)[PER], unsigned enough, bool by_weight) {
    unsigned best = 0;
    for (int bit = 21; bit >= 0; bit--) {                // a weight is at most 2^21
        const unsigned trial = best | 1u << bit;
        unsigned found[1] = {0};
        #pragma unroll
        for (int i = 0; i < PER; i++)
            if (weight[i] >= trial) found[0] += by_weight ? weight[i] : 1;
        team_sum<LANES>(found);
        if (found[0] >= enough) best = trial;
    }
    return best;
}

template <class Number, int LANES, int PER>               // 8 blocks at once leave 64 registers to a thread: enough, and none is spilled
__global__ void __launch_bounds__(THREADS, 8) sample_completions(
        const Number* __restrict__ logits, const long long* __restrict__ masked, const bool* __restrict__ mask, const float* __restrict__ uniforms,
        long long* __restrict__ completions, bool* __restrict__ kept, int B, int T, int G, int V, double temperature, int top_k, double top_p, double min_p) {
    const int lane = threadIdx.x % LANES;
    const long long row = row_of_this_thread<LANES>();
    if (row >= (long long)B * T) return;
    const long long first = row / T * G * T + row % T;   // completion 0 of this row in (B,G,T); completion j lies j * T further
    if (!mask[row]) {
        for (int j = lane; j < G; j += LANES) completions[first + (long long)j * T] = masked[row];
        for (int v = lane; v < V; v += LANES) kept[row * V + v] = false;
        return;
    }

    float z[PER], top[1] = {minus_infinity()};
    unsigned weight[PER], low = 1;                       // S is what weighs at least `low`
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = lane + i * LANES;
        z[i] = v < V ? number(logits[row * V + v]) : minus_infinity();
        top[0] = fmaxf(top[0], z[i] == z[i] ? z[i] : -minus_infinity());   // beside +inf, as which NaN counts, all weigh nothing
    }
    team_max<LANES>(top);
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const double w = exp(((double)z[i] - top[0]) / temperature) * (1 << 21);
        weight[i] = w > 0 ? (unsigned)rint(w) : 0;       // NaN, from inf - inf, is not > 0 either
    }

    if (top_k > 0) low = max(low, largest_threshold<LANES>(weight, top_k, false));
    if (top_p < 1) {
        unsigned all[1] = {0};
        for (int i = 0; i < PER; i++)
            if (weight[i] >= low) all[0] += weight[i];
        team_sum<LANES>(all);
        const unsigned share = ceil(all[0] * top_p);
        low = max(low, largest_threshold<LANES>(weight, max(share, 1u), true));
    }
    if (min_p > 0) low = max(low, (unsigned)ceil((1 << 21) * min_p));   // the likeliest weighs 2^21
    // Replace each weight by the running total up to and including its column. The columns of one i are neighbours: add up
    // along the lanes, at distance 1, 2, 4, ..., then carry the sum of all of them over to the next i.
    unsigned carried = 0;
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = lane + i * LANES;
        if (v < V) kept[row * V + v] = weight[i] >= low;
        unsigned running = weight[i] >= low ? weight[i] : 0;
        for (int distance = 1; distance < LANES; distance *= 2) {
            const unsigned left = __shfl_up_sync(team_of_this_thread<LANES>(), running, distance, LANES);
            if (lane >= distance) running += left;
        }
        weight[i] = carried + running;
        carried += __shfl_sync(team_of_this_thread<LANES>(), running, LANES - 1, LANES);
    }
    // A uniform number points at one unit of the total; the character drawn is the number of columns that end before it.
    for (int j = 0; j < G; j++) {
        const long long at = first + (long long)j * T;
        const unsigned target = (unsigned long long)(uniforms[at] * (1 << 24)) * carried >> 24;   // below the total
        unsigned before[1] = {0};
        #pragma unroll
        for (int i = 0; i < PER; i++) before[0] += weight[i] <= target;
        team_sum<LANES>(before);
        if (lane == j % LANES) completions[at] = carried ? before[0] : masked[row];   // nothing to draw: the blank stays
    }
}
