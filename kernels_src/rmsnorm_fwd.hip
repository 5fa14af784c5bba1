// Forward, plain and fused-add in one body.
//
//   h = x                          or  h = x + residual, rounded to residual_out (ADD_RESIDUAL, ROUND_RESIDUAL)
//   rstd = 1 / sqrt(mean(h²) + eps)
//   y = h · rstd · (weight + weight_offset) + bias
//
// A row is read once: its packs stay in registers between the sum and the scaling (ROW_IN_REGISTERS). Longer rows, and
// all rows on the host, are read a second time from cache.

// What the sum was taken from is what is scaled, so that fused y is rmsnorm(residual_out) to the bit.
constexpr Dtype KEPT = !ADD_RESIDUAL ? X : ROUND_RESIDUAL ? RESIDUAL_OUT : COMPUTE;
constexpr Dtype NORMED = ADD_RESIDUAL && ROUND_RESIDUAL ? RESIDUAL_OUT : X;  // what "llama" rounds the normed row to

KERNEL rmsnorm_fwd(const element<X>* x, const element<RESIDUAL>* residual, const element<WEIGHT>* weight,
                   const element<BIAS>* bias, element<Y>* y, element<RESIDUAL_OUT>* residual_out, real* rstd,
                   int64 rows, int64 x_pitch, int64 residual_pitch, int64 y_pitch, int64 residual_out_pitch,
                   real eps, real weight_offset, int blocks) {
    const Place at = place(rows, blocks);
    if constexpr (WEIGHT != NONE && HEADS > 1) weight += int64(at.head) * COLS;
    if constexpr (BIAS != NONE && HEADS > 1) bias += int64(at.head) * COLS;

    Pack<KEPT> kept[BATCH];
    Pack<WEIGHT> w[BATCH];
    Pack<BIAS> b[BATCH];
    const auto col = [&](int p) LAMBDA { return (p * THREADS_PER_ROW + at.thread) * PACK; };
    const auto load_weight = [&](int begin) LAMBDA {
        if constexpr (WEIGHT != NONE) {
            UNROLL for (int p = 0; p < BATCH; ++p) w[p] = load<WEIGHT>(weight, col(begin + p), COLS);
        }
        if constexpr (BIAS != NONE) {
            UNROLL for (int p = 0; p < BATCH; ++p) b[p] = load<BIAS>(bias, col(begin + p), COLS);
        }
    };
    if constexpr (ROW_IN_REGISTERS) load_weight(0);

    int turn = 0;
    for (int64 base = at.first; base < at.end; base += at.step, ++turn) {
        // All rows of a block take every turn, as the barrier needs; a row beyond the end has no columns.
        const int64 row = at.row(base + at.row_in_block);
        const int cols = ROWS_PER_BLOCK == 1 || base + at.row_in_block < at.end ? COLS : 0;
        const element<X>* x_row = x + row * x_pitch;
        const element<RESIDUAL>* residual_row = residual + row * residual_pitch;
        element<RESIDUAL_OUT>* residual_out_row = residual_out + row * residual_out_pitch;

        const auto read = [&](int begin) LAMBDA {  // a batch in flight before the first of it is used
            Pack<X> xs[BATCH];
            UNROLL for (int p = 0; p < BATCH; ++p) xs[p] = load<X>(x_row, col(begin + p), cols);
            if constexpr (ADD_RESIDUAL) {
                Pack<RESIDUAL> rs[BATCH];
                UNROLL for (int p = 0; p < BATCH; ++p) rs[p] = load<RESIDUAL>(residual_row, col(begin + p), cols);
                UNROLL for (int p = 0; p < BATCH; ++p) {
                    real h[PACK], r[PACK];
                    unpack<X>(xs[p], h);
                    unpack<RESIDUAL>(rs[p], r);
                    UNROLL for (int i = 0; i < PACK; ++i) h[i] += r[i];
                    kept[p] = packed<KEPT>(h);
                }
            } else {
                UNROLL for (int p = 0; p < BATCH; ++p) kept[p] = converted<KEPT>(xs[p]);
            }
        };
        const auto write_residual = [&](int begin) LAMBDA {
            if constexpr (ADD_RESIDUAL) {
                UNROLL for (int p = 0; p < BATCH; ++p) {
                    store<RESIDUAL_OUT>(residual_out_row, col(begin + p), cols, converted<RESIDUAL_OUT>(kept[p]));
                }
            }
        };

        real total = 0;
        for (int section = 0; section < PACKS; section += SECTION) {
            real lanes[LANES] = {};
            for (int begin = section; begin < smaller(PACKS, section + SECTION); begin += BATCH) {
                read(begin);
                // Stored early where the row is not read again: residual_out may be the residual itself.
                if constexpr (ROW_IN_REGISTERS) write_residual(begin);
                UNROLL for (int p = 0; p < BATCH; ++p) {
                    real h[PACK];
                    unpack<KEPT>(kept[p], h);
                    UNROLL for (int i = 0; i < PACK; ++i) lanes[i % LANES] = madd(h[i], h[i], lanes[i % LANES]);
                }
            }
            total += fold(lanes);
        }
        const real scale = inverse_sqrt(row_sum(total, turn) / COLS + eps);
        if (rstd && at.thread == 0 && cols) rstd[row] = scale;

        for (int begin = 0; begin < PACKS; begin += BATCH) {
            if constexpr (!ROW_IN_REGISTERS) {
                load_weight(begin);
                read(begin);
                write_residual(begin);
            }
            UNROLL for (int p = 0; p < BATCH; ++p) {
                real v[PACK], factor[PACK], shift[PACK];
                unpack<KEPT>(kept[p], v);
                UNROLL for (int i = 0; i < PACK; ++i) v[i] *= scale;
                if constexpr (LLAMA) {
                    UNROLL for (int i = 0; i < PACK; ++i) v[i] = rounded<NORMED>(v[i]);
                }
                if constexpr (WEIGHT != NONE) {
                    unpack<WEIGHT>(w[p], factor);
                    if constexpr (OFFSET_WEIGHT) {
                        UNROLL for (int i = 0; i < PACK; ++i) factor[i] += weight_offset;
                    }
                }
                if constexpr (BIAS != NONE) unpack<BIAS>(b[p], shift);
                UNROLL for (int i = 0; i < PACK; ++i) {
                    if constexpr (WEIGHT != NONE && LLAMA) v[i] = rounded<PRODUCT>(v[i] * factor[i]);
                    if constexpr (BIAS != NONE && (WEIGHT == NONE || LLAMA)) v[i] += shift[i];
                    if constexpr (BIAS != NONE && WEIGHT != NONE && !LLAMA) v[i] = madd(v[i], factor[i], shift[i]);
                    if constexpr (BIAS == NONE && WEIGHT != NONE && !LLAMA) v[i] *= factor[i];
                }
                store<Y>(y + row * y_pitch, col(begin + p), cols, packed<Y>(v));
            }
        }
    }
}
