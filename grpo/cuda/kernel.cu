// In CUDA, in one pass over the logits each: sample_completions of grpo/sampling.py, logprobs of
// grpo/logprobs.py, and the gradient of logprobs. No GPU has run this yet: tests/cuda runs it on a
// CPU, and compiles it for sm_80 and sm_90.
//
// Shapes: B masked inputs, T characters, G group size, V vocabulary. A *row*: the V logits of one
// of the B*T positions.
//
// How to read CUDA. A function marked __global__ is run by thousands of threads at once, each with
// another threadIdx.x. 32 neighbouring threads are a warp, and a thread's place in it is its lane.
// Here a row is shared by LANES neighbouring lanes, its team, so that a small vocabulary does not
// leave most of a warp idle. A lane holds PER columns of the row in its registers:
//
//     V <= 32: 4 lanes x 8 columns    V <= 96: 8 x 12    V <= 256: 8 x 32    V <= 1024: 32 x 32
//
// They are dealt out in cards of four: columns 4 * lane to 4 * lane + 3, then the four that lie
// 4 * LANES further, and so on. So neighbouring lanes read neighbouring addresses. Columns past V
// are dealt too, as characters that cannot occur.
//
// The lanes of a team ask each other by __shfl_xor_sync(ALL, x, d): "give me the x of the lane that
// differs from mine in the bits of d". All 32 lanes must arrive at the same call, and do: calls
// depend on the settings alone. A row that is no blank goes along as one of impossible characters.
//
// There are no atomics: every sum has one order, hence the same bits in every run. A row of nothing
// but -inf, or with NaN or +inf, alone comes out as NaN (logprobs), or with an empty kept set.

struct bf16 { unsigned short bits; };  // the upper half of a float: same exponent, shorter mantissa

const int THREADS = 128;               // to a block; kernel.py launches with the same number
const unsigned ALL = 0xffffffffu;      // one bit for each lane of a warp

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ inline float number(float x) { return x; }
__device__ inline float number(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(bf16* to, float x) {   // the nearest; of two equally near the even one
    const unsigned u = __float_as_uint(x);
    to->bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// Where a thread works.
struct Place {
    int lane, team;                    // its number in the team, the team's number in the block
    unsigned row;
    bool there, blank;                 // does the row exist, and is it a blank?
    long long logits;                  // column 0 of the row in (B,T,V)
    long long draws;                   // completion 0 of it in (B,G,T); the j-th lies j * T further
};

template <int LANES>
__device__ inline Place place_of_this_thread(const bool* mask, int B, int T, int G, int V) {
    const int thread = threadIdx.x, team = thread / LANES;
    const unsigned row = blockIdx.x * (THREADS / LANES) + team;
    const bool there = row < (unsigned)B * T;
    const long long logits = (long long)row * V, draws = (long long)(row / T) * G * T + row % T;
    return {thread % LANES, team, row, there, there && mask[row], logits, draws};
}

template <class X> using In = const X* __restrict__;    // an array that is read,
template <class X> using Out = X* __restrict__;         // one that is written, and no other is it

template <class X> struct alignas(4 * sizeof(X)) Card { X x[4]; };

template <class X> __device__ inline Card<X> four(X x) { return {{x, x, x, x}}; }

// The card from column v on. Columns past V keep what `card` held. Where V is a multiple of four so
// is the start of each row, and four columns are read at once: kernel.py sees to the first row.
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

// Each of N numbers over the team: after exchanges at distance LANES/2, ..., 2, 1 every lane holds
// the same N totals.
template <int LANES, class X, int N> __device__ __forceinline__ void team_sum(X (&x)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int n = 0; n < N; n++) x[n] += __shfl_xor_sync(ALL, x[n], distance);
}

template <int LANES, int N> __device__ __forceinline__ void team_max(float (&x)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int n = 0; n < N; n++) x[n] = fmaxf(x[n], __shfl_xor_sync(ALL, x[n], distance));
}

// -------------------------------------------------------------------------------------------------
// logprobs: log q of each drawn character, exact KL and entropy of each blank.
//
// With z the logits, r those of the reference, x = (z - max z) / temperature, Z = sum of exp(x):
//     log p = x - log Z        KL = sum p (x - x_r) - log Z + log Z_r
//     log q = log p - log p(S)        H = log Z - sum p x
// `norms` (B,T,5) keeps {max z, log Z, log p(S), max r, log Z_r} for the backward pass.

template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS) logprobs_forward(
        In<Number> logits, In<Number> ref_logits, In<long long> completions, In<bool> kept,
        In<bool> mask, Out<float> logp, Out<float> ref_logp, Out<float> kl, Out<float> entropy,
        Out<float> norms, int B, int T, int G, int V, double temperature) {
    const Place p = place_of_this_thread<LANES>(mask, B, T, G, V);

    // Read the row, once, and find the largest logit: of all characters, and of those in S.
    const float scale = 1 / (float)temperature;
    float z[PER], r[PER], top[4];      // of z, of r, of z in S, of r in S
    unsigned in_s = 0;                 // bit i: the i-th of this lane's columns is in S
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

    // S is summed from its own maximum: the reference may find all of S so unlikely that exp(x) is
    // 0 throughout. Mostly that maximum is the row's, and nothing is computed twice.
    float sum[6] = {};                 // Z, Z_r, the same over S, sum of p (x - x_r), sum of p x
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const float x = (z[i] - top[0]) * scale, x_r = (r[i] - top[1]) * scale;
        const float e = expf(x), e_r = expf(x_r);       // p and r, yet to be divided by Z and Z_r
        sum[0] += e;
        sum[1] += e_r;
        if (in_s >> i & 1) {
            sum[2] += top_s == 0 ? e : expf(x - top_s);
            sum[3] += ref_top_s == 0 ? e_r : expf(x_r - ref_top_s);
        }
        if (e > 0) {                                    // 0 log 0 = 0, though x is -inf
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
    // The lanes share out the completions; the row is still in the cache.
    for (int j = p.lane; j < G; j += LANES) {
        const long long at = p.draws + (long long)j * T, v = completions[at];
        float x = p.blank ? not_a_number() : 0, x_r = x;   // NaN: it is not in the vocabulary
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

// dz[v] = 1/temperature ( sum_j g_logp[j] (1[v = y_j] - q[v])
//                         + g_kl p[v] (log p[v] - log r[v] - KL) - g_entropy p[v] (log p[v] + H) )
template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS) logprobs_backward(
        In<Number> logits, In<Number> ref_logits, In<long long> completions, In<bool> kept,
        In<bool> mask, In<float> kl, In<float> entropy, In<float> norms, In<float> g_logp,
        In<float> g_kl, In<float> g_entropy, Out<Number> g_logits, int B, int T, int G, int V,
        double temperature) {
    const Place p = place_of_this_thread<LANES>(mask, B, T, G, V);

    // sum_j g_logp[j] 1[v = y_j] of each column, in shared memory: registers have no address [v].
    // The lanes fetch LANES completions at once, show them one by one, and the column's owner adds.
    __shared__ Card<float> all_drawn[THREADS / LANES][LANES * PER / 4];
    Card<float>* drawn = all_drawn[p.team];   // the card from column v on is number v / 4
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
                if (prob != 0)         // 0 log 0 = 0; NaN is not 0, so that a broken row shows
                    d += prob * (gk * (log_p - log_r - kl[p.row]) - gh * (log_p + entropy[p.row]));
                store(&out.x[k], d * scale);
            }
        }
        write(g_logits + p.logits, v, V, out);
    }
}

// -------------------------------------------------------------------------------------------------
// sample_completions: which characters may be drawn, and the draws, in whole numbers throughout.
// top-k, top-p and min-p all drop what is lighter than some threshold, so the kept set is one
// number: the least weight kept.

// The largest threshold such that the characters of at least that weight still number `enough`, or
// weigh `enough` together, from its highest bit down: a bit is set if those that remain are enough.
// (top-p may count what top-k dropped: it is lighter, so the heavier ones are enough already.)
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

// 5 blocks at once leave 96 registers to a thread, 10 leave 48: so none is spilled.
template <class Number, int LANES, int PER>
__global__ void __launch_bounds__(THREADS, PER > 12 ? 5 : 10) sample_completions(
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
            top[0] = fmaxf(top[0], x == x ? x : -minus_infinity());   // NaN counts as +inf, and
        }                                                             // beside it all weigh nothing
    }
    team_max<LANES>(top);
    const double scale = 1 / temperature;
    unsigned weight[PER], low = 1;     // S is what weighs at least `low`
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const double w = exp(((double)z[i] - top[0]) * scale) * (1 << 21);
        weight[i] = w > 0 ? (unsigned)rint(w) : 0;      // NaN, from inf - inf, is not > 0 either
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
    if (min_p > 0) low = max(low, (unsigned)ceil((1 << 21) * min_p));   // the likeliest weighs 2^21

    // Where each column ends, if those of S are laid end to end, each as long as its weight: summed
    // within a card, then along the lanes, at distance 1, 2, 4, ..., then over to the next cards.
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
            s.x[k] = weight[i + k] >= low;
            own += s.x[k] ? weight[i + k] : 0;
            end.x[k] = own;
        }
        if (p.there) write(kept + p.logits, v, V, s);
        unsigned running = own;        // this card and those of the lanes before
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

    // A uniform number points at one unit of the total. The character drawn is the number of
    // columns that end before it, found from its highest bit down.
    const unsigned* end = ends[0].x;
    for (int j = p.lane; j < G; j += LANES) {
        const long long at = p.draws + (long long)j * T;
        const unsigned u = uniforms[at] * (1 << 24);
        const unsigned target = (unsigned long long)u * carried >> 24;   // below the total
        int v = 0;
        #pragma unroll
        for (int step = 512; step > 0; step /= 2)
            if (v + step <= LANES * PER && end[v + step - 1] <= target) v += step;
        completions[at] = carried ? v : masked[p.row];  // nothing to draw: the blank stays
    }
}
