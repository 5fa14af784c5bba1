// Forward, plain and fused-add in one body.
//
//   h = x                          or  h = x + residual, rounded to residual_out (ADD_RESIDUAL, ROUND_RESIDUAL)
//   rstd = 1 / sqrt(mean(h²) + eps)
//   y = h · rstd · (weight + weight_offset) + bias
//
// Between the sum and the scaling the first KEPT packs of a row stay in registers and the next STASHED in shared
// memory. What is beyond (of rows too long for both, and of all rows on the host) is read a second time from cache,
// BATCH packs at a time.

// What the sum was taken from is what is scaled, so that fused y is rmsnorm(residual_out) to the bit.
constexpr Dtype HELD = !ADD_RESIDUAL ? X : ROUND_RESIDUAL ? RESIDUAL_OUT : COMPUTE;
constexpr Dtype NORMED = ADD_RESIDUAL && ROUND_RESIDUAL ? RESIDUAL_OUT : X;  // what "llama" rounds the normed row to

// A pack as it comes from memory; left alone until it is used, so that many are in flight.
struct Input {
    Pack<X> x;
    Pack<RESIDUAL> residual;
};
DEVICE void settle_input(Input& in) {
    settle_pack<X>(in.x);
    if constexpr (ADD_RESIDUAL) settle_pack<RESIDUAL>(in.residual);
}
struct Factors {
    Pack<WEIGHT> weight;
    Pack<BIAS> bias;
};

KERNEL rmsnorm_fwd(const element<X>* x, const element<RESIDUAL>* residual, const element<WEIGHT>* weight,
                   const element<BIAS>* bias, element<Y>* y, element<RESIDUAL_OUT>* residual_out, real* rstd,
                   int64 rows, int64 x_pitch, int64 residual_pitch, int64 y_pitch, int64 residual_out_pitch, real eps,
                   real weight_offset, int blocks) {
    Place at = place(rows, blocks);
    if constexpr (WEIGHT != NONE && HEADS > 1) weight += int64(at.head) * COLS;
    if constexpr (BIAS != NONE && HEADS > 1) bias += int64(at.head) * COLS;

    const auto load_factors = [&](int p, Factors& to) LAMBDA {
        if constexpr (WEIGHT != NONE) to.weight = load<WEIGHT>(weight, at.col(p), COLS);
        if constexpr (BIAS != NONE) to.bias = load<BIAS>(bias, at.col(p), COLS);
    };
    const auto load_packs = [&](int64 i, int begin, int count, Input* to) LAMBDA {
        const bool there = ROWS_PER_BLOCK == 1 || i + at.row_in_block < at.end;
        if (ROWS_ARE_UNIFORM && !there) return;  // cheaper than zeros: what comes of nothing is not stored
        const int64 row = at.row(i + at.row_in_block);
        const int cols = there ? COLS : 0;
        UNROLL for (int p = 0; p < count; ++p) {
            to[p].x = load_once<X>(x + row * x_pitch, at.col(begin + p), cols);
            if constexpr (ADD_RESIDUAL) {
                to[p].residual = load_once<RESIDUAL>(residual + row * residual_pitch, at.col(begin + p), cols);
            }
        }
    };
    const auto hold = [&](const Input& in) LAMBDA {
        if constexpr (!ADD_RESIDUAL) return converted<HELD>(in.x);
        wide h[WIDES], r[WIDES];
        unpack<X>(in.x, h);
        unpack<RESIDUAL>(in.residual, r);
        UNROLL for (int k = 0; k < WIDES; ++k) h[k] += r[k];
        return packed<HELD>(h);
    };

    constexpr int SLOTS = KEPT > 0 ? KEPT : 1;
    Input in[SLOTS], next[PREFETCH ? SLOTS : 1], passing[BATCH];
    Pack<HELD> kept[SLOTS];
    DYNAMIC_SHARED(Pack<HELD>, stash, 0, STASHED * THREADS);  // of each thread its own, so nothing waits for it
    Factors factors[SLOTS], passing_factors[BATCH];
    if (PREFETCH && at.first < at.end) load_packs(at.first, 0, KEPT, next);
    if constexpr (EARLY_WEIGHT) {
        UNROLL for (int p = 0; p < KEPT; ++p) load_factors(p, factors[p]);
    }

    int turn = 0;
    for (int64 i = at.first; i < at.end; i += at.step, ++turn) {
        // All rows of a block take every turn, as the barrier needs; a row beyond the end has no columns.
        const int64 row = at.row(i + at.row_in_block);
        const int cols = ROWS_PER_BLOCK == 1 || i + at.row_in_block < at.end ? COLS : 0;
        const auto store_residual = [&](int p, const Pack<HELD>& held) LAMBDA {
            if constexpr (ADD_RESIDUAL) {
                const Pack<RESIDUAL_OUT> total = converted<RESIDUAL_OUT>(held);
                store<RESIDUAL_OUT>(residual_out + row * residual_out_pitch, at.col(p), cols, total);
            }
        };
        const auto add_squares = [&](const Pack<HELD>& held, wide* lanes) LAMBDA {
            wide h[WIDES];
            unpack<HELD>(held, h);
            UNROLL for (int k = 0; k < WIDES; ++k) lanes[k % ACCUMULATORS] = madd(h[k], h[k], lanes[k % ACCUMULATORS]);
        };

        at.renew();
        real total = 0;
        wide lanes[ACCUMULATORS] = {};
        if constexpr (PREFETCH) {
            UNROLL for (int p = 0; p < KEPT; ++p) in[p] = next[p];
            if (i + at.step < at.end) load_packs(i + at.step, 0, KEPT, next);
        } else {
            load_packs(i, 0, KEPT, in);
        }
        UNROLL for (int p = 0; p < KEPT; ++p) settle_input(in[p]);
        UNROLL for (int p = 0; p < KEPT; ++p) {
            kept[p] = hold(in[p]);
            store_residual(p, kept[p]);
            add_squares(kept[p], lanes);
        }
        for (int begin = KEPT; begin < KEPT + STASHED; begin += BATCH) {
            load_packs(i, begin, BATCH, passing);
            UNROLL for (int p = 0; p < BATCH; ++p) {
                const Pack<HELD> held = hold(passing[p]);
                store_residual(begin + p, held);
                add_squares(held, lanes);
                stash[(begin + p - KEPT) * THREADS + thread_index()] = held;
            }
        }
        // residual_out may be the residual itself: what is read again is stored only then.
        for (int section = KEPT + STASHED; section < PACKS; section += SECTION) {
            for (int begin = section; begin < smaller(PACKS, section + SECTION); begin += BATCH) {
                load_packs(i, begin, BATCH, passing);
                UNROLL for (int p = 0; p < BATCH; ++p) add_squares(hold(passing[p]), lanes);
            }
            if (section + SECTION < PACKS) {
                total += fold(lanes);
                UNROLL for (int k = 0; k < ACCUMULATORS; ++k) lanes[k] = wide{};
            }
        }
        total += fold(lanes);
        const real scale = inverse_sqrt(row_sum(total, turn) / COLS + eps);
        at.renew();
        if (rstd && at.is_first_thread() && cols) rstd[row] = scale;
        if constexpr (UNPACK_AGAIN) {
            UNROLL for (int p = 0; p < KEPT; ++p) forget_values<HELD>(kept[p], unknown_zero(scale));
        }
        if constexpr (EARLY_WEIGHT) {
            UNROLL for (int p = 0; p < KEPT; ++p) {
                if constexpr (WEIGHT != NONE) settle_pack<WEIGHT>(factors[p].weight);
                if constexpr (BIAS != NONE) settle_pack<BIAS>(factors[p].bias);
            }
        }

        const auto store_normed = [&](int p, const Pack<HELD>& held, const Factors& by) LAMBDA {
            wide v[WIDES], factor[WIDES], shift[WIDES];
            unpack<HELD>(held, v);
            UNROLL for (int k = 0; k < WIDES; ++k) v[k] *= scale;
            if constexpr (LLAMA) {
                UNROLL for (int k = 0; k < WIDES; ++k) v[k] = rounded<NORMED>(v[k]);
            }
            if constexpr (WEIGHT != NONE) unpack<WEIGHT>(by.weight, factor);
            if constexpr (OFFSET_WEIGHT) {
                UNROLL for (int k = 0; k < WIDES; ++k) factor[k] += weight_offset;
            }
            if constexpr (BIAS != NONE) unpack<BIAS>(by.bias, shift);
            UNROLL for (int k = 0; k < WIDES; ++k) {
                if constexpr (WEIGHT != NONE && LLAMA) v[k] = rounded<PRODUCT>(v[k] * factor[k]);
                if constexpr (BIAS != NONE && (WEIGHT == NONE || LLAMA)) v[k] += shift[k];
                if constexpr (BIAS != NONE && WEIGHT != NONE && !LLAMA) v[k] = madd(v[k], factor[k], shift[k]);
                if constexpr (BIAS == NONE && WEIGHT != NONE && !LLAMA) v[k] *= factor[k];
            }
            store<Y>(y + row * y_pitch, at.col(p), cols, packed<Y>(v));
        };
        UNROLL for (int begin = 0; begin < KEPT; begin += BATCH) {
            if constexpr (!EARLY_WEIGHT) {
                UNROLL for (int p = begin; p < smaller(KEPT, begin + BATCH); ++p) load_factors(p, factors[p]);
            }
            UNROLL for (int p = begin; p < smaller(KEPT, begin + BATCH); ++p) store_normed(p, kept[p], factors[p]);
        }
        for (int begin = KEPT; begin < KEPT + STASHED; begin += BATCH) {
            UNROLL for (int p = 0; p < BATCH; ++p) load_factors(begin + p, passing_factors[p]);
            UNROLL for (int p = 0; p < BATCH; ++p) {
                store_normed(begin + p, stash[(begin + p - KEPT) * THREADS + thread_index()], passing_factors[p]);
            }
        }
        for (int begin = KEPT + STASHED; begin < PACKS; begin += BATCH) {
            UNROLL for (int p = 0; p < BATCH; ++p) load_factors(begin + p, passing_factors[p]);
            load_packs(i, begin, BATCH, passing);
            UNROLL for (int p = 0; p < BATCH; ++p) {
                const Pack<HELD> held = hold(passing[p]);
                store_residual(begin + p, held);
                store_normed(begin + p, held, passing_factors[p]);
            }
        }
    }
}
