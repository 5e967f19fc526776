// This file computes three functions of grpo/policy.py on a GPU: sample_completions,
// compute_logprobs, here called logprobs, and the gradient of logprobs. Each goes over a row of
// logits once. After that logprobs looks up only the drawn characters.
//
// No GPU has run it yet. tests/cuda runs it on a CPU, and compiles it for two kinds of GPU, sm_80
// and sm_90.
//
// Shapes: B masked inputs, T characters, G group size, V vocabulary. There are B*T positions, and
// the V logits of one position are called a row. A position is a blank if `mask` is true there. We
// draw and score characters only at blanks.
//
// How to read CUDA. Thousands of threads run a function marked __global__ at the same time. They
// come in blocks of THREADS threads. blockIdx.x is the number of the block, and threadIdx.x is the
// number of the thread in its block. 32 neighbouring threads are called a warp. All threads of a
// block can use the arrays marked __shared__. After __syncwarp() the threads of a warp see what
// each of them has written there.
//
// Here a team of LANES neighbouring threads works on one row. The number of a thread in its team is
// called its lane. (CUDA itself counts lanes over the whole warp.) Each thread takes four columns
// at a time. So if a whole warp worked on a small row, most of its threads would have nothing to
// do. A thread works on PER columns in all, which is few enough to keep them in its registers:
//
//     V <= 32: 4 lanes x 8 columns    V <= 96: 8 lanes x 12 columns
//
// A team takes the columns in groups of four, which we call cards. Lane 0 takes columns 0 to 3,
// lane 1 takes columns 4 to 7, and so on. After the last lane comes lane 0 again. So neighbouring
// threads read neighbouring addresses. A team may have more columns than V. We treat the surplus
// ones as characters that cannot occur, or never write what we computed for them.
//
// Three calls let a thread see the variable x of another thread. __shfl_xor_sync(ALL, x, d) gives
// it the x of the thread whose lane is its own with the bits of d flipped. __shfl_sync(ALL, x, k,
// LANES) gives it the x of lane k of its team. __shfl_up_sync(ALL, x, d, LANES) gives it the x of
// the lane d places before its own, or its own x if there is no such lane. All 32 threads of a warp
// must make such a call together. So which calls are made may depend on the shapes and the
// settings, but never on the row. That is why a team takes part even if its position is no blank,
// or if it has no row because the last block has more teams than rows are left. It acts as if all
// characters of its row were impossible.
//
// We use no atomic operations, so every sum is added up in a fixed order, and every run gives the
// same bits. If a row has only -inf, or has a NaN or +inf, then no other row suffers. logprobs
// gives NaN for everything that depends on this row, and sample_completions keeps no character of
// it.

struct bf16 { unsigned short bits; };  // the upper 16 bits of a float

const int THREADS = 128;               // the threads of a block; kernel.py has the same number
const unsigned ALL = 0xffffffffu;      // one bit for each lane of a warp

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ inline float number(float x) { return x; }
__device__ inline float number(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline void store(float* to, float x) { *to = x; }
// Round to the nearest bf16. If two are equally near, take the even one.
__device__ inline void store(bf16* to, float x) {
    const unsigned u = __float_as_uint(x);
    to->bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// This says where a thread works.
struct Place {
    int lane;                          // the number of the thread in its team
    int team;                          // the number of the team in its block
    unsigned row;
    bool there;                        // does the row exist?
    bool blank;                        // does it exist, and is its position a blank?
    long long logits;                  // where the row begins in a tensor (B,T,V)
    long long draws;                   // where this position of completion 0 lies in a tensor
                                       // (B,G,T); that of completion j lies j * T further
};

template <int LANES>
__device__ inline Place place_of_this_thread(const bool* mask, int B, int T, int G, int V) {
    const int thread = threadIdx.x, team = thread / LANES;
    const unsigned row = blockIdx.x * (THREADS / LANES) + team;
    const bool there = row < (unsigned)B * T;
    const long long logits = (long long)row * V, draws = (long long)(row / T) * G * T + row % T;
    return {thread % LANES, team, row, there, there && mask[row], logits, draws};
}

// These are the types of the arrays that a kernel is given. With __restrict__ we promise the
// compiler that an array that we write overlaps no other.
template <class X> using In = const X* __restrict__;    // an array that we read
template <class X> using Out = X* __restrict__;         // an array that we write

template <class X> struct alignas(4 * sizeof(X)) Card { X x[4]; };

template <class X> __device__ inline Card<X> four(X x) { return {{x, x, x, x}}; }

// Read the card that begins at column v. Where there is no column, `card` keeps what it held
// before. If V is a multiple of four, the address of every card is a multiple of the card's size,
// so we read it in one piece. (kernel.py makes sure that the tensor itself begins at such an
// address.)
template <class X>
__device__ __forceinline__ void read(const X* row, int v, int V, Card<X>& card) {
    if (V % 4 == 0 && v < V) card = *(const Card<X>*)(row + v);
    else for (int k = 0; k < 4; k++) if (v + k < V) card.x[k] = row[v + k];
}

template <class X>
__device__ __forceinline__ void write(X* row, int v, int V, const Card<X>& card) {
    if (V % 4 == 0 && v < V) *(Card<X>*)(row + v) = card;
    else for (int k = 0; k < 4; k++) if (v + k < V) row[v + k] = card.x[k];
}

// Add up each of N numbers over the team. A thread exchanges its sums with the thread at distance
// LANES/2, then LANES/4, ..., 2, 1. After that every thread of the team has the same N totals.
template <int LANES, class X, int N> __device__ __forceinline__ void team_sum(X (&x)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int n = 0; n < N; n++) x[n] += __shfl_xor_sync(ALL, x[n], distance);
}

template <int LANES, int N> __device__ __forceinline__ void team_max(float (&x)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int n = 0; n < N; n++) x[n] = fmaxf(x[n], __shfl_xor_sync(ALL, x[n], distance));
}

// -------------------------------------------------------------------------------------------------
// logprobs computes log q of each drawn character, also by the reference, and the exact KL and
// entropy of each blank.
//
// Let z be the logits of a row, x = (z - max z) / temperature, and Z the sum of exp(x). The
// probabilities are p = exp(x) / Z. For the reference these are called r, x_r, Z_r and p_r. S is
// the set of characters that could be drawn, which are those that `kept` marks. p(S) is the sum of
// p over S, and q is p without the characters outside S, scaled so that its sum is 1. Then
//     log p = x - log Z               KL = sum p (x - x_r) - log Z + log Z_r
//     log q = log p - log p(S)        H = log Z - sum p x
// In grpo/policy.py p is called q, p_r is called q_ref, and q is called q_S.
// `norms` (B,T,5) keeps {max z, log Z, log p(S), max r, log Z_r} for the backward pass.

template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS) logprobs_forward(
        In<Number> logits, In<Number> ref_logits, In<long long> completions, In<bool> kept,
        In<bool> mask, Out<float> logp, Out<float> ref_logp, Out<float> kl, Out<float> entropy,
        Out<float> norms, int B, int T, int G, int V, double temperature) {
    const Place p = place_of_this_thread<LANES>(mask, B, T, G, V);

    // Read the row and the row of the reference. In each find the largest logit of all characters
    // and the largest logit of those in S.
    const float scale = 1 / (float)temperature;
    float z[PER], r[PER];
    float top[4];                      // the largest of z, of r, of z in S, of r in S
    unsigned in_s = 0;                 // bit i says whether column i of this thread is in S
    for (int n = 0; n < 4; n++) top[n] = minus_infinity();
    #pragma unroll
    for (int i = 0; i < PER; i += 4) {
        const int v = 4 * p.lane + i * LANES;
        Card<Number> a, b;
        Card<bool> s = four(false);
        if (p.blank) {
            read(logits + p.logits, v, V, a);
            read(ref_logits + p.logits, v, V, b);
            read(kept + p.logits, v, V, s);
        }
        for (int k = 0; k < 4; k++) {
            const bool real = p.blank && v + k < V;
            z[i + k] = real ? number(a.x[k]) : minus_infinity();
            r[i + k] = real ? number(b.x[k]) : minus_infinity();
            in_s |= (unsigned)s.x[k] << (i + k);
            top[0] = fmaxf(top[0], z[i + k]);
            top[1] = fmaxf(top[1], r[i + k]);
            top[2] = fmaxf(top[2], s.x[k] ? z[i + k] : minus_infinity());
            top[3] = fmaxf(top[3], s.x[k] ? r[i + k] : minus_infinity());
        }
    }
    team_max<LANES>(top);
    const float top_s = (top[2] - top[0]) * scale, ref_top_s = (top[3] - top[1]) * scale;

    // sum[0] is Z, and sum[1] is Z_r. sum[2] is the sum of exp(x - top_s) over S, where top_s is
    // the largest x in S, and sum[3] is the same for the reference. With e = exp(x), sum[4] is the
    // sum of e (x - x_r), and sum[5] is the sum of e x. We divide these two by Z at the end.
    //
    // We subtract top_s because the reference may find all of S so unlikely that exp(x_r) would be
    // 0 for every character in S. In most rows S has the likeliest character of all. Then top_s is
    // 0, and we need no second exp.
    float sum[6] = {};
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const float x = (z[i] - top[0]) * scale, x_r = (r[i] - top[1]) * scale;
        const float e = expf(x), e_r = expf(x_r);       // e / Z is p, and e_r / Z_r is p_r.
        sum[0] += e;
        sum[1] += e_r;
        if (in_s >> i & 1) {
            sum[2] += top_s == 0 ? e : expf(x - top_s);
            sum[3] += ref_top_s == 0 ? e_r : expf(x_r - ref_top_s);
        }
        if (e > 0) {                                    // 0 log 0 is 0, but 0 * -inf is NaN
            sum[4] += e * (x - x_r);
            sum[5] += e * x;
        }
    }
    team_sum<LANES>(sum);
    if (!p.there) return;
    const float log_z = logf(sum[0]), ref_log_z = logf(sum[1]);
    const float log_s = top_s + logf(sum[2]) - log_z;                  // log p(S)
    const float ref_log_s = ref_top_s + logf(sum[3]) - ref_log_z;

    if (p.lane == 0) {
        const float norm[5] = {top[0], log_z, log_s, top[1], ref_log_z};
        for (int n = 0; n < 5; n++) norms[(long long)p.row * 5 + n] = norm[n];
        kl[p.row] = p.blank ? sum[4] / sum[0] - log_z + ref_log_z : 0;
        entropy[p.row] = p.blank ? log_z - sum[5] / sum[0] : 0;
    }
    // The threads of the team share the completions among themselves. Each looks up the logits of
    // its characters again, which are still in the cache.
    for (int j = p.lane; j < G; j += LANES) {
        const long long at = p.draws + (long long)j * T, v = completions[at];
        float x = p.blank ? not_a_number() : 0, x_r = x;   // It stays NaN if v >= V or v < 0.
        if (p.blank && 0 <= v && v < V) {
            const float a = number(logits[p.logits + v]), b = number(ref_logits[p.logits + v]);
            const bool keep = kept[p.logits + v];
            x = (keep ? (a - top[0]) * scale : minus_infinity()) - log_z - log_s;
            x_r = (keep ? (b - top[1]) * scale : minus_infinity()) - ref_log_z - ref_log_s;
        }
        logp[at] = x;
        ref_logp[at] = x_r;
    }
}

// The gradient of a row, as in logprobs_backward of grpo/policy.py, is
//
// dz[v] = 1/temperature ( sum_j g_logp[j] (1[v = y_j] - q[v])
//                         + g_kl p[v] (log p[v] - log p_r[v] - KL)
//                         - g_entropy p[v] (log p[v] + H) )
//
// Here y_j is the drawn character of completion j, 1[v = y_j] is 1 if v is that character and 0
// otherwise, and q[v] is 0 outside S. The reference gets no gradient. In the code log p_r is log_r.
template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS) logprobs_backward(
        In<Number> logits, In<Number> ref_logits, In<long long> completions, In<bool> kept,
        In<bool> mask, In<float> kl, In<float> entropy, In<float> norms, In<float> g_logp,
        In<float> g_kl, In<float> g_entropy, Out<Number> g_logits, int B, int T, int G, int V,
        double temperature) {
    const Place p = place_of_this_thread<LANES>(mask, B, T, G, V);

    // First compute sum_j g_logp[j] 1[v = y_j] for each column v. These sums lie in shared memory,
    // because we cannot pick a register by a number that is known only at run time. The team reads
    // LANES completions at a time, one in each thread. Then every thread of the team looks at each
    // of them in turn, and the thread that owns the drawn column adds its g_logp to the sum there.
    __shared__ Card<float> all_drawn[THREADS / LANES][LANES * PER / 4];
    Card<float>* drawn = all_drawn[p.team];   // the card that begins at column v is number v / 4
    for (int i = 0; i < PER / 4; i++) drawn[p.lane + i * LANES] = four(0.f);
    __syncwarp();
    float total[1] = {0};              // sum_j g_logp[j]
    for (int first = 0; first < G; first += LANES) {
        const int j = first + p.lane;
        const bool mine = p.blank && j < G;
        const long long at = p.draws + (long long)j * T, y = mine ? completions[at] : -1;
        const float my_g = mine ? g_logp[at] : 0;
        const int my_column = 0 <= y && y < V ? (int)y : -1;
        total[0] += my_g;
        #pragma unroll 4
        for (int k = 0; k < LANES && first + k < G; k++) {
            const int column = __shfl_sync(ALL, my_column, k, LANES);
            const float g = __shfl_sync(ALL, my_g, k, LANES);
            if (column >= 0 && column / 4 % LANES == p.lane) drawn[column / 4].x[column % 4] += g;
        }
    }
    team_sum<LANES>(total);
    if (!p.there) return;

    const float scale = 1 / (float)temperature, gk = g_kl[p.row], gh = g_entropy[p.row];
    const float *norm = norms + (long long)p.row * 5, top = norm[0], ref_top = norm[3];
    const float log_z = norm[1], log_s = norm[2], ref_log_z = norm[4];
    #pragma unroll
    for (int i = 0; i < PER; i += 4) {
        const int v = 4 * p.lane + i * LANES;
        Card<Number> a, b, out;
        Card<bool> s = four(false);
        for (int k = 0; k < 4; k++) store(&out.x[k], 0);
        if (p.blank) {
            read(logits + p.logits, v, V, a);
            read(ref_logits + p.logits, v, V, b);
            read(kept + p.logits, v, V, s);
            const Card<float> drawn_here = drawn[v / 4];
            for (int k = 0; k < 4; k++) {
                const float log_p = (number(a.x[k]) - top) * scale - log_z, prob = expf(log_p);
                const float log_r = (number(b.x[k]) - ref_top) * scale - ref_log_z;
                float d = drawn_here.x[k];
                if (s.x[k]) d -= total[0] * expf(log_p - log_s);
                if (prob != 0)         // 0 log 0 is 0; a NaN is not 0, so it reaches the gradient
                    d += prob * (gk * (log_p - log_r - kl[p.row]) - gh * (log_p + entropy[p.row]));
                store(&out.x[k], d * scale);
            }
        }
        write(g_logits + p.logits, v, V, out);
    }
}

// -------------------------------------------------------------------------------------------------
// sample_completions decides which characters may be drawn, and draws one for each completion. The
// weight of a character is 2^21 exp((z - max z) / temperature), rounded to a whole number. From
// there on we compute with whole numbers, so the order of a sum makes no difference. top-k, top-p
// and min-p each drop all characters whose weight is below some threshold. So the set S is
// described by one number, the largest of these thresholds. It is at least 1, so no character of
// weight 0 is in S. Only if nothing is truncated is S the whole vocabulary.

// Find the largest threshold that keeps enough characters, or 0 if there are not enough. `enough`
// is the number of characters that must be kept, or with by_weight their total weight. We find the
// threshold bit by bit, from the highest bit down. We set a bit if enough characters still reach
// the threshold. (For top-p we also count characters that top-k has dropped. This does no harm:
// those that top-k keeps are enough without them, so the threshold is never below that of top-k.)
template <int LANES, int PER>
__device__ __forceinline__ unsigned largest_threshold(
        const unsigned (&weight)[PER], unsigned enough, bool by_weight) {
    unsigned best = 0;
    for (int bit = 21; bit >= 0; bit--) {               // a weight is at most 2^21
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

// The last number of __launch_bounds__ says how many blocks each multiprocessor of the GPU should
// be able to run at once. With 10 blocks a thread may use 48 registers. This is enough, so the
// compiler need not move any values to memory.
template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS, 10) sample_completions(
        In<Number> logits, In<long long> masked, In<bool> mask, In<float> uniforms,
        Out<long long> completions, Out<bool> kept, int B, int T, int G, int V,
        double temperature, double top_k, double top_p, double min_p) {
    const Place p = place_of_this_thread<LANES>(mask, B, T, G, V);
    float z[PER], top[1] = {minus_infinity()};
    #pragma unroll
    for (int i = 0; i < PER; i += 4) {
        const int v = 4 * p.lane + i * LANES;
        Card<Number> a;
        if (p.blank) read(logits + p.logits, v, V, a);
        for (int k = 0; k < 4; k++) {
            const float x = p.blank && v + k < V ? number(a.x[k]) : minus_infinity();
            z[i + k] = x;
            // A NaN counts as +inf here, and then every character of the row has the weight 0.
            top[0] = fmaxf(top[0], x == x ? x : -minus_infinity());
        }
    }
    team_max<LANES>(top);
    const double scale = 1 / temperature;
    unsigned weight[PER], low = 1;     // S has the characters whose weight is at least `low`, and
                                       // if nothing is truncated, all others, too
    const bool whole = p.blank && !(top_k > 0 || top_p < 1 || min_p > 0);
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const double w = exp(((double)z[i] - top[0]) * scale) * (1 << 21);
        weight[i] = w > 0 ? (unsigned)rint(w) : 0;      // inf - inf is NaN, which gets 0, too
    }

    if (top_k > 0) low = max(low, largest_threshold<LANES>(weight, top_k, false));
    if (top_p < 1) {
        unsigned all[1] = {0};
        #pragma unroll
        for (int i = 0; i < PER; i++) all[0] += weight[i] >= low ? weight[i] : 0;
        team_sum<LANES>(all);
        const unsigned share = ceil(all[0] * top_p);
        low = max(low, largest_threshold<LANES>(weight, max(share, 1u), true));
    }
    // The largest weight of a row is 2^21.
    if (min_p > 0) low = max(low, (unsigned)ceil((1 << 21) * min_p));

    // Lay the characters of S end to end, each as long as its weight, and compute where each one
    // ends. This is a running sum. In each round of the loop every lane has one card. We take the
    // sum within the card, then along the lanes, and add `carried`, the total of earlier rounds.
    __shared__ Card<unsigned> all_ends[THREADS / LANES][LANES * PER / 4];
    Card<unsigned>* ends = all_ends[p.team];
    unsigned carried = 0;
    #pragma unroll
    for (int i = 0; i < PER; i += 4) {
        const int v = 4 * p.lane + i * LANES;
        Card<bool> s;
        Card<unsigned> end;
        unsigned own = 0;
        for (int k = 0; k < 4; k++) {
            s.x[k] = whole || weight[i + k] >= low;
            own += s.x[k] ? weight[i + k] : 0;
            end.x[k] = own;
        }
        if (p.there) write(kept + p.logits, v, V, s);
        unsigned running = own;        // the sum of this card and of the cards of earlier lanes
        for (int distance = 1; distance < LANES; distance *= 2) {
            const unsigned left = __shfl_up_sync(ALL, running, distance, LANES);
            if (p.lane >= distance) running += left;
        }
        for (int k = 0; k < 4; k++) end.x[k] += carried + running - own;
        ends[v / 4] = end;
        carried += __shfl_sync(ALL, running, LANES - 1, LANES);
    }
    __syncwarp();
    if (!p.there) return;

    // A uniform number in [0, 1) becomes a whole number below the total length, the target. We draw
    // the character that covers it. If n columns end at or before the target, this is character n.
    // We find n by binary search. (A character outside S has no length, so it is never drawn.) S is
    // empty where there is no blank, or where the row has a NaN, a +inf or only -inf. There the
    // completion gets what the input has.
    const unsigned* end = ends[0].x;
    for (int j = p.lane; j < G; j += LANES) {
        const long long at = p.draws + (long long)j * T;
        const unsigned u = uniforms[at] * (1 << 24);
        const unsigned target = (unsigned long long)u * carried >> 24;   // less than the total
        int v = 0;
        #pragma unroll
        for (int step = 512; step > 0; step /= 2)
            if (v + step <= LANES * PER && end[v + step - 1] <= target) v += step;
        completions[at] = carried ? v : masked[p.row];  // If S is empty, the input stays.
    }
}
