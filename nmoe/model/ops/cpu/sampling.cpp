// Samples from rows of logits by the inverse of their cumulative distribution.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vector.h"

// Shapes: B rows, V vocabulary.

namespace {

constexpr long CHUNK = 64;

}  // namespace

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
