// Backward, plain and fused-add in one body. x is what was normed: the input, or residual_out.
//
//   x̂ = x · rstd,  g = dout · (weight + weight_offset)
//   dx = rstd · (g − x̂ · mean(g · x̂)) + dresidual_out
//   dweight = Σ over rows of dout · x̂,  dbias = Σ over rows of dout
//
// A block keeps its rows' share of dweight in registers and writes one row of fp32 partials at the end; dweight_reduce
// adds those in a fixed order. No atomics: the same inputs give the same bits. Where a row does not fit in registers
// (and on the host) it is read twice, and the share is kept in that row of partials itself.

// The sum over the row groups of a block, in the first of them: halves added to halves, a fixed order.
template <int ROWS>
DEVICE void block_sum(real (*sums)[PACK], const Place& at) {
    if constexpr (ROWS > 1) {
        SHARED real upper[ROWS / 2][BATCH * PACK][THREADS_PER_ROW];
        for (int half = ROWS / 2; half > 0; half /= 2) {
            sync();
            if (at.row_in_block >= half && at.row_in_block < 2 * half) {
                UNROLL for (int k = 0; k < BATCH * PACK; ++k) {
                    upper[at.row_in_block - half][k][at.thread] = sums[k / PACK][k % PACK];
                }
            }
            sync();
            if (at.row_in_block < half) {
                UNROLL for (int k = 0; k < BATCH * PACK; ++k) {
                    sums[k / PACK][k % PACK] += upper[at.row_in_block][k][at.thread];
                }
            }
        }
    }
}

KERNEL rmsnorm_bwd(const element<X>* x, const element<WEIGHT>* weight, const element<DOUT>* dout, const real* rstd,
                   const element<DRESIDUAL_OUT>* dresidual_out, element<DX>* dx, element<DRESIDUAL>* dresidual,
                   real* dweight_partials, real* dbias_partials, int64 rows, int64 x_pitch, int64 dout_pitch,
                   int64 dresidual_out_pitch, int64 dx_pitch, int64 dresidual_pitch, int64 partials_pitch,
                   real weight_offset, int blocks) {
    const Place at = place(rows, blocks);
    if constexpr (WEIGHT != NONE && HEADS > 1) weight += int64(at.head) * COLS;
    const auto col = [&](int p) LAMBDA { return (p * THREADS_PER_ROW + at.thread) * PACK; };

    // Partials are padded to whole packs and aligned, whatever the operands are.
    const int padded = (COLS + PACK - 1) / PACK * PACK;
    real* dweight_row = dweight_partials + block_index() * partials_pitch;
    real* dbias_row = dbias_partials + block_index() * partials_pitch;
    real dw[BATCH][PACK] = {}, db[BATCH][PACK] = {};
    const auto read_sums = [&](const real* partials, int begin, real(*sums)[PACK]) LAMBDA {
        UNROLL for (int p = 0; p < BATCH; ++p) unpack<COMPUTE>(load<COMPUTE, PACK>(partials, col(begin + p), padded), sums[p]);
    };
    const auto write_sums = [&](real* partials, int begin, const real(*sums)[PACK]) LAMBDA {
        UNROLL for (int p = 0; p < BATCH; ++p) store<COMPUTE, PACK>(partials, col(begin + p), padded, packed<COMPUTE>(sums[p]));
    };
    if constexpr (!ROW_IN_REGISTERS) {  // the memory's content is no one's: every block starts from zeros of its own
        for (int begin = 0; begin < PACKS; begin += BATCH) {
            if constexpr (NEED_DWEIGHT) write_sums(dweight_row, begin, dw);
            if constexpr (NEED_DBIAS) write_sums(dbias_row, begin, db);
        }
    }

    Pack<WEIGHT> w[BATCH];
    const auto load_weight = [&](int begin) LAMBDA {
        if constexpr (WEIGHT != NONE) {
            UNROLL for (int p = 0; p < BATCH; ++p) w[p] = load<WEIGHT>(weight, col(begin + p), COLS);
        }
    };
    if constexpr (ROW_IN_REGISTERS) load_weight(0);

    // A batch of a row's packs, as they lie in memory, and the row's rstd.
    struct Inputs {
        Pack<X> x[BATCH];
        Pack<DOUT> dout[BATCH];
        Pack<DRESIDUAL_OUT> dresidual_out[BATCH];
        real rstd;
    };
    const auto read = [&](int64 base, int begin, Inputs& in, bool last_use) LAMBDA {
        const int64 row = at.row(base + at.row_in_block);
        const int cols = base + at.row_in_block < at.end ? COLS : 0;
        UNROLL for (int p = 0; p < BATCH; ++p) in.x[p] = load<X>(x + row * x_pitch, col(begin + p), cols);
        UNROLL for (int p = 0; p < BATCH; ++p) in.dout[p] = load<DOUT>(dout + row * dout_pitch, col(begin + p), cols);
        in.rstd = cols ? rstd[row] : real(0);
        if (DRESIDUAL_OUT != NONE && last_use) {
            const element<DRESIDUAL_OUT>* from = dresidual_out + row * dresidual_out_pitch;
            UNROLL for (int p = 0; p < BATCH; ++p) in.dresidual_out[p] = load<DRESIDUAL_OUT>(from, col(begin + p), cols);
        }
    };
    // g and x̂ of one pack; also what the sums over rows take from it.
    const auto gradients = [&](const Inputs& in, int p, real* g, real* normed, real* d) LAMBDA {
        real factor[PACK];
        unpack<X>(in.x[p], normed);
        unpack<DOUT>(in.dout[p], d);
        UNROLL for (int i = 0; i < PACK; ++i) normed[i] *= in.rstd;
        if constexpr (WEIGHT != NONE) unpack<WEIGHT>(w[p], factor);
        UNROLL for (int i = 0; i < PACK; ++i) {
            if constexpr (OFFSET_WEIGHT) factor[i] += weight_offset;
            g[i] = WEIGHT != NONE ? d[i] * factor[i] : d[i];
        }
    };

    Inputs in, next;
    if (PREFETCH && at.first < at.end) read(at.first, 0, next, true);
    int turn = 0;
    for (int64 base = at.first; base < at.end; base += at.step, ++turn) {
        const int64 row = at.row(base + at.row_in_block);
        const int cols = ROWS_PER_BLOCK == 1 || base + at.row_in_block < at.end ? COLS : 0;
        if constexpr (PREFETCH) {
            in = next;
            if (base + at.step < at.end) read(base + at.step, 0, next, true);
        } else if constexpr (ROW_IN_REGISTERS) {
            read(base, 0, in, true);
        }

        real mean = 0;  // of g · x̂
        if constexpr (NEED_DX) {
            real total = 0;
            for (int section = 0; section < PACKS; section += SECTION) {
                real lanes[LANES] = {};
                for (int begin = section; begin < smaller(PACKS, section + SECTION); begin += BATCH) {
                    if constexpr (!ROW_IN_REGISTERS) {
                        load_weight(begin);
                        read(base, begin, in, false);
                    }
                    UNROLL for (int p = 0; p < BATCH; ++p) {
                        real g[PACK], normed[PACK], d[PACK];
                        gradients(in, p, g, normed, d);
                        UNROLL for (int i = 0; i < PACK; ++i) {
                            lanes[i % LANES] = madd(g[i], normed[i], lanes[i % LANES]);
                        }
                    }
                }
                total += fold(lanes);
            }
            mean = row_sum(total, turn) / COLS;
        }

        for (int begin = 0; begin < PACKS; begin += BATCH) {
            if constexpr (!ROW_IN_REGISTERS) {
                load_weight(begin);
                read(base, begin, in, true);
                if constexpr (NEED_DWEIGHT) read_sums(dweight_row, begin, dw);
                if constexpr (NEED_DBIAS) read_sums(dbias_row, begin, db);
            }
            UNROLL for (int p = 0; p < BATCH; ++p) {
                real g[PACK], normed[PACK], d[PACK];
                gradients(in, p, g, normed, d);
                UNROLL for (int i = 0; i < PACK; ++i) {
                    if constexpr (NEED_DWEIGHT) dw[p][i] = madd(d[i], normed[i], dw[p][i]);
                    if constexpr (NEED_DBIAS) db[p][i] += d[i];
                }
                if constexpr (NEED_DX) {
                    real v[PACK];
                    UNROLL for (int i = 0; i < PACK; ++i) v[i] = in.rstd * madd(-normed[i], mean, g[i]);
                    if constexpr (DRESIDUAL_OUT != NONE) {
                        real d_residual[PACK];
                        unpack<DRESIDUAL_OUT>(in.dresidual_out[p], d_residual);
                        UNROLL for (int i = 0; i < PACK; ++i) v[i] += d_residual[i];
                    }
                    store<DX>(dx + row * dx_pitch, col(begin + p), cols, packed<DX>(v));
                    if constexpr (DRESIDUAL != NONE) {  // only where its dtype is not dx's
                        store<DRESIDUAL>(dresidual + row * dresidual_pitch, col(begin + p), cols, packed<DRESIDUAL>(v));
                    }
                }
            }
            if constexpr (!ROW_IN_REGISTERS) {
                if constexpr (NEED_DWEIGHT) write_sums(dweight_row, begin, dw);
                if constexpr (NEED_DBIAS) write_sums(dbias_row, begin, db);
            }
        }
    }

    if constexpr (ROW_IN_REGISTERS) {
        if constexpr (NEED_DWEIGHT) block_sum<ROWS_PER_BLOCK>(dw, at);
        if constexpr (NEED_DBIAS) block_sum<ROWS_PER_BLOCK>(db, at);
        if (at.row_in_block == 0) {
            if constexpr (NEED_DWEIGHT) write_sums(dweight_row, 0, dw);
            if constexpr (NEED_DBIAS) write_sums(dbias_row, 0, db);
        }
    }
}
