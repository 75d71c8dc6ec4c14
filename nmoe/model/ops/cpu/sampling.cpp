// Samples from rows of logits by the inverse of their cumulative distribution, and finds the tokens that top-k and top-p keep.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vector.h"

// Shapes: B rows, V vocabulary.

namespace {

constexpr long CHUNK = 64;

// Logits are put into bins by how far they lie below the largest; only the bin where a row is cut has to be sorted.
constexpr long BINS = 4096;
constexpr float BINS_PER_NAT = 128;

struct Bin {
    long count = 0;
    double mass = 0;
};

// The tokens of a bin by descending logit, equal ones in order of id, at most `most` of them.
std::vector<int32_t> sorted_bin(const float* logits, const std::vector<uint16_t>& bin_V, long bin, long most) {
    std::vector<int32_t> tokens;
    for (long v = 0; v < static_cast<long>(bin_V.size()); ++v)
        if (bin_V[v] == bin) tokens.push_back(static_cast<int32_t>(v));
    std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    if (static_cast<long>(tokens.size()) > most) tokens.resize(most);
    return tokens;
}

// `kept` for one row: a byte for each token. `scratch` has room for V numbers.
void keep(const float* logits, float top_p, long top_k, uint8_t* kept, long V, std::vector<uint16_t>& bin_V, float* scratch) {
    using namespace nmoe;
    const bool cuts_k = top_k > 0 && top_k < V, cuts_p = top_p < 1;
    std::fill_n(kept, V, 1);
    float most = -INFINITY;
    bool missing = false;
    for (long v = 0; v < V; ++v) most = std::max(most, logits[v]), missing |= std::isnan(logits[v]);
    // A row that is not finite stays whole, so that sampling from it finds what is wrong: a NaN cut out would be hidden.
    if (!(cuts_k || cuts_p) || !std::isfinite(most) || missing) return;
    std::vector<Bin> bins(BINS);
    for (long v = 0; v < V; v += 16) store(scratch + v, exp(load(logits + v, first(V - v)) - all(most)), first(V - v));
    for (long v = 0; v < V; ++v) {
        const float below = (most - logits[v]) * BINS_PER_NAT;
        const long bin = below < BINS - 1 ? static_cast<long>(below) : BINS - 1;
        bin_V[v] = static_cast<uint16_t>(bin);
        ++bins[bin].count;
        bins[bin].mass += scratch[v];
    }
    // Tokens of bins before `last` stay, and of those of `last` the ones in `edge`.
    long last = BINS;
    std::vector<int32_t> edge;
    double total = 0;
    if (cuts_k) {
        long count = 0;
        for (last = 0; count + bins[last].count < top_k; ++last) count += bins[last].count, total += bins[last].mass;
        edge = sorted_bin(logits, bin_V, last, top_k - count);
        for (const int32_t token : edge) total += scratch[token];
    } else {
        for (const Bin& bin : bins) total += bin.mass;
    }
    if (cuts_p) {
        // The fewest whose mass reaches the share; the largest logit always stays.
        const double wanted = top_p * total;
        double mass = 0;
        long bin = 0;
        while (bin < std::min(last, BINS - 1) && mass + bins[bin].mass < wanted) mass += bins[bin].mass, ++bin;
        if (bin != last) edge = sorted_bin(logits, bin_V, last = bin, V);
        size_t stays = 0;
        while (stays < edge.size() && (mass < wanted || (stays == 0 && last == 0))) mass += scratch[edge[stays++]];
        edge.resize(stays);
    }
    for (long v = 0; v < V; ++v) kept[v] = bin_V[v] < last;
    for (const int32_t token : edge) kept[token] = 1;
}

}  // namespace

// Marks the tokens that top-k and then top-p keep, as `nmoe.engine.native.sampler.kept_mask` defines them.
extern "C" void nmoe_kept(const float* logits_BV, const float* top_p_B, const int64_t* top_k_B, uint8_t* kept_BV, long B, long V) {
#pragma omp parallel
    {
        std::vector<uint16_t> bin_V(V);
        std::vector<float> scratch(V);
#pragma omp for schedule(dynamic)
        for (long b = 0; b < B; ++b) keep(logits_BV + b * V, top_p_B[b], top_k_B[b], kept_BV + b * V, V, bin_V, scratch.data());
    }
}

// Samples each row at its temperature; at 0 takes the largest logit, with log-probability 0. Returns the number of rows that
// are not finite, whose draws are meaningless.
extern "C" long nmoe_sample(const float* logits_BV, const float* temperature_B, const float* uniforms_B, int64_t* tokens_B,
                            float* logprobs_B, long B, long V) {
    using namespace nmoe;
    long bad = 0;
#pragma omp parallel reduction(+ : bad)
    {
        std::vector<float> masses(V);
        std::vector<double> until((V + CHUNK - 1) / CHUNK);  // mass up to a chunk's end
#pragma omp for schedule(static)
        for (long b = 0; b < B; ++b) {
            const float* logits = logits_BV + b * V;
            const float temperature = temperature_B[b] == 0 ? 1 : temperature_B[b];
            v16 highest = all(-INFINITY);
            long v = 0;
            for (; v + 16 <= V; v += 16) highest = max(highest, load(logits + v));
            if (v < V) highest = max(highest, select(first(V - v), load(logits + v, first(V - v)), highest));
            const float most = largest_of(highest);
            double total = 0;
            for (long start = 0; start < V; start += CHUNK) {
                v16 sum = zero();
                for (long v = start; v < std::min(V, start + CHUNK); v += 16) {
                    const mask16 mask = first(V - v);
                    const v16 shifted = (load(logits + v, mask) - all(most)) / all(temperature);
                    const v16 mass = select(mask, nmoe::exp(shifted), zero());
                    store(masses.data() + v, mass, mask);
                    sum = sum + mass;
                }
                total += sum_of(sum);
                until[start / CHUNK] = total;
            }
            if (!std::isfinite(total) || !std::isfinite(most)) {
                ++bad, tokens_B[b] = 0, logprobs_B[b] = 0;
                continue;
            }
            long token = 0;
            if (temperature_B[b] == 0) {
                while (logits[token] != most) ++token;
                tokens_B[b] = token, logprobs_B[b] = 0;
                continue;
            }
            // The first token whose cumulative mass exceeds the draw. Rounding may leave none: then the last one with any mass.
            const double draw = uniforms_B[b] * total;
            long chunk = 0, last = 0;
            while (chunk + 1 < static_cast<long>(until.size()) && until[chunk] <= draw) ++chunk;
            double cumulative = chunk ? until[chunk - 1] : 0;
            token = -1;
            for (long v = chunk * CHUNK; v < V; ++v) {
                cumulative += masses[v];
                if (masses[v] > 0) last = v;
                if (cumulative > draw && masses[v] > 0) {
                    token = v;
                    break;
                }
            }
            if (token < 0) token = last;
            tokens_B[b] = token;
            logprobs_B[b] = static_cast<float>((static_cast<double>(logits[token]) - most) / temperature - std::log(total));
        }
    }
    return bad;
}
