// Backward, plain and fused-add in one body. x is what was normed: the input, or residual_out.
//
//   x̂ = x · rstd,  g = dout · (weight + weight_offset),  mean = Σ over columns of g · x̂ / COLS
//   dx = rstd · (g − x̂ · mean) + dresidual_out
//   dweight = Σ over rows of dout · x̂,  dbias = Σ over rows of dout
//
// A block keeps its rows' share of dweight in registers and writes one row of partials at the end; dweight_reduce adds
// those in a fixed order (a lone block writes dweight itself: DIRECT). No atomics: the same inputs give the same bits.
//
// Rows too long for registers take two launches: MEAN_ONLY sums g · x̂ over whole rows; then, with MEAN_GIVEN, blocks
// share a row out in TILES, whose columns' dweight fits in registers again. The host reads a row twice from cache and
// keeps the share of dweight in the row of partials itself.

// A pack as it comes from memory; left alone until it is used, so that many are in flight.
struct Input {
    Pack<X> x;
    Pack<DOUT> dout;
    Pack<DRESIDUAL_OUT> dresidual_out;
};
constexpr bool SUM_HERE = MEAN_ONLY || (NEED_DX && !MEAN_GIVEN);
// What is known of the whole row.
struct RowInput {
    real rstd, mean;
};

// The sum over the row groups of a block, in the first of them: halves added to halves, a fixed order.
template <int ROWS>
DEVICE void block_sum(real (*sums)[PACK]) {
    if constexpr (ROWS > 1) {
        SHARED real upper[ROWS / 2][BATCH * PACK][THREADS_PER_ROW];
        const int row = thread_index() / THREADS_PER_ROW, thread = thread_index() % THREADS_PER_ROW;
        for (int half = ROWS / 2; half > 0; half /= 2) {
            sync();
            if (row >= half && row < 2 * half) {
                UNROLL for (int k = 0; k < BATCH * PACK; ++k) upper[row - half][k][thread] = sums[k / PACK][k % PACK];
            }
            sync();
            if (row < half) {
                UNROLL for (int k = 0; k < BATCH * PACK; ++k) sums[k / PACK][k % PACK] += upper[row][k][thread];
            }
        }
    }
}

KERNEL rmsnorm_bwd(const element<X>* x, const element<WEIGHT>* weight, const element<DOUT>* dout, const real* rstd,
                   const element<DRESIDUAL_OUT>* dresidual_out, real* means, element<DX>* dx,
                   element<DRESIDUAL>* dresidual, real* dweight_partials, real* dbias_partials, int64 rows,
                   int64 x_pitch, int64 dout_pitch, int64 dresidual_out_pitch, int64 dx_pitch, int64 dresidual_pitch,
                   int64 partials_pitch, real weight_offset, int blocks) {
    const Place at = place(rows, blocks);
    if constexpr (WEIGHT != NONE && HEADS > 1) weight += int64(at.head) * COLS;

    // Partials are padded to whole packs and aligned, whatever the operands are. DIRECT: they are dweight and dbias.
    const int padded = (COLS + PACK - 1) / PACK * PACK;
    const int64 slot = at.group * HEADS + at.head;
    real* const dweight_row = dweight_partials + slot * partials_pitch;
    real* const dbias_row = dbias_partials + slot * partials_pitch;
    real dw[BATCH][PACK] = {}, db[BATCH][PACK] = {};
    const auto read_sums = [&](const real* partials, int begin, real(*sums)[PACK]) LAMBDA {
        UNROLL for (int p = 0; p < BATCH; ++p) {
            unpack<COMPUTE>(load<COMPUTE, PACK>(partials, at.col(begin + p), padded), sums[p]);
        }
    };
    const auto write_sums = [&](real* partials, int begin, const real(*sums)[PACK]) LAMBDA {
        UNROLL for (int p = 0; p < BATCH; ++p) {
            store<COMPUTE, PACK>(partials, at.col(begin + p), padded, packed<COMPUTE>(sums[p]));
        }
    };
    const auto write_results = [&](real* results, const real(*sums)[PACK]) LAMBDA {
        element<DWEIGHT>* const row = reinterpret_cast<element<DWEIGHT>*>(results) + int64(at.head) * COLS;
        UNROLL for (int p = 0; p < BATCH; ++p) store<DWEIGHT, 1>(row, at.col(p), COLS, packed<DWEIGHT>(sums[p]));
    };
    if constexpr (!ROW_IN_REGISTERS) {  // the memory's content is no one's: every block starts from zeros of its own
        for (int begin = 0; begin < PACKS; begin += BATCH) {
            if constexpr (NEED_DWEIGHT) write_sums(dweight_row, begin, dw);
            if constexpr (NEED_DBIAS) write_sums(dbias_row, begin, db);
        }
    }

    const auto load_weight = [&](int p, Pack<WEIGHT>& to) LAMBDA {
        if constexpr (WEIGHT != NONE) to = load<WEIGHT>(weight, at.col(p), COLS);
    };
    const auto load_pack = [&](int64 i, int p, Input& to) LAMBDA {
        const int64 row = at.row(i + at.row_in_block);
        const int cols = i + at.row_in_block < at.end ? COLS : 0;
        to.x = load<X>(x + row * x_pitch, at.col(p), cols);
        to.dout = load<DOUT>(dout + row * dout_pitch, at.col(p), cols);
    };
    const auto load_added = [&](int64 i, int p, Input& to) LAMBDA {
        if constexpr (DRESIDUAL_OUT != NONE) {
            const int64 row = at.row(i + at.row_in_block);
            const int cols = i + at.row_in_block < at.end ? COLS : 0;
            to.dresidual_out = load<DRESIDUAL_OUT>(dresidual_out + row * dresidual_out_pitch, at.col(p), cols);
        }
    };
    const auto load_row_input = [&](int64 i) LAMBDA {
        const int64 row = at.row(i + at.row_in_block);
        const bool there = i + at.row_in_block < at.end;
        return RowInput{there ? plain_nan(rstd[row]) : real(0), MEAN_GIVEN && there ? means[row] : real(0)};
    };
    RowInput of_row, of_next;
    // g, x̂ and dout of one pack of this row.
    const auto gradients = [&](const Input& in, const Pack<WEIGHT>& w, real* g, real* normed, real* d) LAMBDA {
        real factor[PACK];
        unpack<X>(in.x, normed);
        unpack<DOUT>(in.dout, d);
        UNROLL for (int k = 0; k < PACK; ++k) normed[k] *= of_row.rstd;
        if constexpr (WEIGHT != NONE) unpack<WEIGHT>(w, factor);
        UNROLL for (int k = 0; k < PACK; ++k) {
            if constexpr (OFFSET_WEIGHT) factor[k] += weight_offset;
            g[k] = WEIGHT != NONE ? d[k] * factor[k] : d[k];
        }
    };

    Input in[BATCH], next[PREFETCH ? BATCH : 1];
    Pack<WEIGHT> w[BATCH];
    if constexpr (EARLY_WEIGHT) {
        UNROLL for (int p = 0; p < BATCH; ++p) load_weight(p, w[p]);
    }
    if (PREFETCH && at.first < at.end) {
        of_next = load_row_input(at.first);
        UNROLL for (int p = 0; p < BATCH; ++p) {
            load_pack(at.first, p, next[p]);
            load_added(at.first, p, next[p]);
        }
    }
    int turn = 0;
    for (int64 i = at.first; i < at.end; i += at.step, ++turn) {
        const int64 row = at.row(i + at.row_in_block);
        const int cols = ROWS_PER_BLOCK == 1 || i + at.row_in_block < at.end ? COLS : 0;
        if constexpr (PREFETCH) {
            of_row = of_next;
            UNROLL for (int p = 0; p < BATCH; ++p) in[p] = next[p];
            if (i + at.step < at.end) {
                of_next = load_row_input(i + at.step);
                UNROLL for (int p = 0; p < BATCH; ++p) {
                    load_pack(i + at.step, p, next[p]);
                    load_added(i + at.step, p, next[p]);
                }
            }
        } else {
            of_row = load_row_input(i);
            if constexpr (ROW_IN_REGISTERS) {
                UNROLL for (int p = 0; p < BATCH; ++p) load_pack(i, p, in[p]);
            }
        }

        real mean = of_row.mean;
        if constexpr (SUM_HERE) {
            real total = 0;
            for (int section = 0; section < PACKS; section += SECTION) {
                real lanes[LANES] = {};
                ROLLED for (int begin = section; begin < smaller(PACKS, section + SECTION); begin += BATCH) {
                    UNROLL for (int p = 0; p < BATCH; ++p) {
                        if constexpr (!EARLY_WEIGHT) load_weight(begin + p, w[p]);
                        if constexpr (!ROW_IN_REGISTERS) load_pack(i, begin + p, in[p]);
                    }
                    UNROLL for (int p = 0; p < BATCH; ++p) {
                        real g[PACK], normed[PACK], d[PACK];
                        gradients(in[p], w[p], g, normed, d);
                        UNROLL for (int k = 0; k < PACK; ++k) lanes[k % LANES] =
                            madd(g[k], normed[k], lanes[k % LANES]);
                    }
                }
                total += fold(lanes);
            }
            if constexpr (!PREFETCH && ROW_IN_REGISTERS) {  // on its way during the reduction, and no sooner: registers
                UNROLL for (int p = 0; p < BATCH; ++p) load_added(i, p, in[p]);
            }
            mean = row_sum(total, turn) / COLS;
            if constexpr (UNPACK_AGAIN) {
                const uint32 zero = unknown_zero(mean);
                UNROLL for (int p = 0; p < BATCH; ++p) {
                    forget_values<X>(in[p].x, zero);
                    forget_values<DOUT>(in[p].dout, zero);
                    if constexpr (WEIGHT != NONE) forget_values<WEIGHT>(w[p], zero);
                }
            }
        }
        if constexpr (MEAN_ONLY) {
            if (at.is_first_thread() && cols) means[row] = mean;
            continue;
        }

        for (int begin = 0; begin < PACKS; begin += BATCH) {
            UNROLL for (int p = 0; p < BATCH; ++p) {
                if constexpr (NEED_DX && !EARLY_WEIGHT) load_weight(begin + p, w[p]);
                if constexpr (!ROW_IN_REGISTERS) load_pack(i, begin + p, in[p]);
                if constexpr (!PREFETCH && (!ROW_IN_REGISTERS || !SUM_HERE)) load_added(i, begin + p, in[p]);
            }
            if constexpr (!ROW_IN_REGISTERS) {
                if constexpr (NEED_DWEIGHT) read_sums(dweight_row, begin, dw);
                if constexpr (NEED_DBIAS) read_sums(dbias_row, begin, db);
            }
            UNROLL for (int p = 0; p < BATCH; ++p) {
                real g[PACK], normed[PACK], d[PACK];
                gradients(in[p], w[p], g, normed, d);
                UNROLL for (int k = 0; k < PACK; ++k) {
                    if constexpr (NEED_DWEIGHT) dw[p][k] = madd(d[k], normed[k], dw[p][k]);
                    if constexpr (NEED_DBIAS) db[p][k] += d[k];
                }
                if constexpr (NEED_DX) {
                    real v[PACK];
                    UNROLL for (int k = 0; k < PACK; ++k) v[k] = of_row.rstd * madd(-normed[k], mean, g[k]);
                    if constexpr (DRESIDUAL_OUT != NONE) {
                        real added[PACK];
                        unpack<DRESIDUAL_OUT>(in[p].dresidual_out, added);
                        UNROLL for (int k = 0; k < PACK; ++k) v[k] += added[k];
                    }
                    store<DX>(dx + row * dx_pitch, at.col(begin + p), cols, packed<DX>(v));
                    if constexpr (DRESIDUAL != NONE) {  // only where its dtype is not dx's
                        store<DRESIDUAL>(dresidual + row * dresidual_pitch, at.col(begin + p), cols,
                                         packed<DRESIDUAL>(v));
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
        if constexpr (NEED_DWEIGHT) block_sum<ROWS_PER_BLOCK>(dw);
        if constexpr (NEED_DBIAS) block_sum<ROWS_PER_BLOCK>(db);
        if (at.row_in_block == 0) {
            if constexpr (NEED_DWEIGHT && DIRECT) write_results(dweight_partials, dw);
            if constexpr (NEED_DBIAS && DIRECT) write_results(dbias_partials, db);
            if constexpr (NEED_DWEIGHT && !DIRECT) write_sums(dweight_row, 0, dw);
            if constexpr (NEED_DBIAS && !DIRECT) write_sums(dbias_row, 0, db);
        }
    }
}
