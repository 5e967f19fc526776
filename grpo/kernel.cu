// ComputeLogProbs.forward and logprobs_backward of grpo/policy.py, written for a GPU.
// Keep that file open next to this one: same names, same formulas, but the math is in float64, and
// KL and H go from the forward to the backward function.
//
// Never seen CUDA? It's C, except that thousands of threads run a function marked __global__ at the
// same time. They come in blocks of blockDim.x threads. All that tells one thread from another is
// the number of its block, blockIdx.x, and its own number in there, threadIdx.x, and from these two
// it works out what to do. Ours have it easy: each takes position t of input b and loops over its V
// characters, and no two threads ever write to the same place. __device__ marks a helper that only
// the GPU calls. extern "C" lets kernel.py find a function by its name.
//
// Tensors arrive as bare pointers, so we do the indexing. Position i = b * T + t has its logits at
// logits + i * V. Its first completion is number `first`, and the next one is always T further on.

// log Σ_v exp(s[v] / τ). Take it from s[v] / τ, and you have log q[v].
__device__ double log_sum_exp(const float* s, int V, double temperature) {
    double largest = s[0], sum = 0;
    for (int v = 1; v < V; v++) if (s[v] > largest) largest = s[v];
    for (int v = 0; v < V; v++) sum += exp((s[v] - largest) / temperature);  // can't overflow
    return largest / temperature + log(sum);
}

// logp = log q[y], ref_logp = log q_ref[y], KL = Σ_v q (log q − log q_ref), H = −Σ_v q log q
extern "C" __global__ void logprobs_forward(
        const float* logits, const float* ref_logits, const long long* completions,
        const bool* mask, float* logp, float* ref_logp, float* kl, float* entropy,
        int B, int G, int T, int V, double temperature) {
    long long i = blockIdx.x * blockDim.x + threadIdx.x, first = i / T * G * T + i % T;
    if (i >= B * T) return;
    for (int j = 0; j < G; j++) logp[first + j * T] = ref_logp[first + j * T] = 0;
    kl[i] = entropy[i] = 0;
    if (!mask[i]) return;

    const float *s = logits + i * V, *s_ref = ref_logits + i * V;
    double log_sum = log_sum_exp(s, V, temperature), KL = 0, H = 0;
    double ref_log_sum = log_sum_exp(s_ref, V, temperature);
    for (int v = 0; v < V; v++) {
        double log_q = s[v] / temperature - log_sum, q = exp(log_q);
        double log_q_ref = s_ref[v] / temperature - ref_log_sum;
        KL += q * (log_q - log_q_ref);
        H -= q * log_q;
    }
    kl[i] = KL, entropy[i] = H;
    for (int j = 0; j < G; j++) {
        long long y = completions[first + j * T];
        logp[first + j * T] = s[y] / temperature - log_sum;
        ref_logp[first + j * T] = s_ref[y] / temperature - ref_log_sum;
    }
}

// ds[v] = 1/τ · ( Σ_j g_logp[j] (1[v = y_j] − q[v]) + g_kl q[v] (log q[v] − log q_ref[v] − KL)
//                 − g_entropy q[v] (log q[v] + H) )
extern "C" __global__ void logprobs_backward(
        const float* logits, const float* ref_logits, const long long* completions,
        const bool* mask, const float* kl, const float* entropy, const float* g_logp,
        const float* g_kl, const float* g_entropy, float* g_logits,
        int B, int G, int T, int V, double temperature) {
    long long i = blockIdx.x * blockDim.x + threadIdx.x, first = i / T * G * T + i % T;
    if (i >= B * T) return;
    float* ds = g_logits + i * V;
    for (int v = 0; v < V; v++) ds[v] = 0;
    if (!mask[i]) return;

    const float *s = logits + i * V, *s_ref = ref_logits + i * V;
    double log_sum = log_sum_exp(s, V, temperature), sum_g = 0;
    double ref_log_sum = log_sum_exp(s_ref, V, temperature);
    for (int j = 0; j < G; j++) {
        ds[completions[first + j * T]] += g_logp[first + j * T];  // Σ_j g_logp[j] 1[v = y_j]
        sum_g += g_logp[first + j * T];
    }
    for (int v = 0; v < V; v++) {
        double log_q = s[v] / temperature - log_sum, q = exp(log_q);
        double log_q_ref = s_ref[v] / temperature - ref_log_sum;
        double d_kl = q * (log_q - log_q_ref - kl[i]), d_entropy = -q * (log_q + entropy[i]);
        ds[v] = (ds[v] - sum_g * q + g_kl[i] * d_kl + g_entropy[i] * d_entropy) / temperature;
    }
}
