// Backward, plain and fused-add in one body. x is what was normed: the input, or residual_out.
//
//   x̂ = x · rstd,  g = dout · (weight + weight_offset),  mean = Σ over columns of g · x̂ / COLS
//   dx = rstd · (g − x̂ · mean) + dresidual_out
//   dweight = Σ over rows of dout · x̂,  dbias = Σ over rows of dout
//
// A block keeps its rows' share of dweight in registers and writes one row of partials at the end; dweight_reduce adds
// those in a fixed order (a lone block writes dweight itself: DIRECT). No atomics: the same inputs give the same bits.
//
// Where a row fits in registers but not beside its share of dweight, that lies in shared memory (SUMS_IN_SHARED). Of
// longer rows the last KEPT packs stay in registers and the others come straight to shared memory (STASHED), the next
// row's as soon as this one's are done with. Rows too long for both take two launches: MEAN_ONLY sums g · x̂ over whole
// rows; then, with MEAN_GIVEN, blocks share a row out in TILES, whose columns' dweight fits in registers again. The
// host reads a row twice from cache and keeps the share of dweight in the row of partials itself.

// A pack as it comes from memory; left alone until it is used, so that many are in flight.
struct Input {
    Pack<X> x;
    Pack<DOUT> dout;
    Pack<DRESIDUAL_OUT> dresidual_out;
};
DEVICE void settle_input(Input& in) {
    settle_pack<X>(in.x);
    settle_pack<DOUT>(in.dout);
    if constexpr (DRESIDUAL_OUT != NONE) settle_pack<DRESIDUAL_OUT>(in.dresidual_out);
}
constexpr bool SUM_HERE = MEAN_ONLY || (NEED_DX && !MEAN_GIVEN);
// Packs that have a slot to themselves; behind those of a stashed row BATCH slots through which its other packs pass.
constexpr int LASTING = STASHED > 0 ? KEPT : BATCH, PASSING = STASHED > 0 ? KEPT : 0, SLOTS = PASSING + BATCH;
constexpr bool ROW_STAYS = ROW_IN_REGISTERS || STASHED > 0;  // on chip between its two uses
constexpr bool VALUES_KEPT = ROW_IN_REGISTERS && !UNPACK_AGAIN;
// When dresidual_out comes, if not with the next row: while the row is summed, or where registers are dearer one pack
// ahead of its use.
constexpr bool ADDED_AHEAD = !PREFETCH && ROW_IN_REGISTERS && PACKS > 4;
constexpr bool ADDED_DURING_SUM = !PREFETCH && ROW_STAYS && SUM_HERE && !ADDED_AHEAD;
constexpr bool ADDED_KEPT = VALUES_KEPT && PREFETCH && DRESIDUAL_OUT != NONE;
// 16 bytes of the sums in shared memory: of each thread its own, so nothing waits for them.
constexpr int SUMS = 16 / sizeof(real), SUMS_OF_PACK = PACK / SUMS;
struct alignas(16) Sums {
    real at[SUMS];
};
// What is known of the whole row.
struct RowInput {
    real rstd, mean;
};

// The sum over the row groups of a block, in the first of them: halves added to halves, a fixed order.
template <int ROWS>
DEVICE void block_sum(wide (*sums)[WIDES]) {
    if constexpr (ROWS > 1) {
        SHARED wide upper[ROWS / 2][BATCH * WIDES][THREADS_PER_ROW];
        const int row = row_in_block(), thread = thread_index() % THREADS_PER_ROW;
        for (int half = ROWS / 2; half > 0; half /= 2) {
            sync();
            if (row >= half && row < 2 * half) {
                UNROLL for (int k = 0; k < BATCH * WIDES; ++k) {
                    upper[row - half][k][thread] = sums[k / WIDES][k % WIDES];
                }
            }
            sync();
            if (row < half) {
                UNROLL for (int k = 0; k < BATCH * WIDES; ++k) sums[k / WIDES][k % WIDES] += upper[row][k][thread];
            }
        }
    }
}

KERNEL rmsnorm_bwd(const element<X>* x, const element<WEIGHT>* weight, const element<DOUT>* dout, const real* rstd,
                   const element<DRESIDUAL_OUT>* dresidual_out, real* means, element<DX>* dx,
                   element<DRESIDUAL>* dresidual, real* dweight_partials, real* dbias_partials, int64 rows,
                   int64 x_pitch, int64 dout_pitch, int64 dresidual_out_pitch, int64 dx_pitch, int64 dresidual_pitch,
                   int64 partials_pitch, real weight_offset, int blocks) {
    Place at = place(rows, blocks);
    if constexpr (WEIGHT != NONE && HEADS > 1) weight += int64(at.head) * COLS;

    // Partials are padded to whole packs and aligned, whatever the operands are. DIRECT: they are dweight and dbias.
    const int padded = (COLS + PACK - 1) / PACK * PACK;
    const int64 slot = at.group * HEADS + at.head;
    real* const dweight_row = dweight_partials + slot * partials_pitch;
    real* const dbias_row = dbias_partials + slot * partials_pitch;
    wide dw[BATCH][WIDES] = {}, db[BATCH][WIDES] = {};
    const auto read_sums = [&](const real* partials, int begin, wide(*sums)[WIDES]) LAMBDA {
        UNROLL for (int p = 0; p < BATCH; ++p) {
            unpack<COMPUTE>(load<COMPUTE, PACK>(partials, at.col(begin + p), padded), sums[p]);
        }
    };
    const auto write_sum = [&](real* partials, int p, const wide* sum)
                               LAMBDA { store<COMPUTE, PACK>(partials, at.col(p), padded, packed<COMPUTE>(sum)); };
    const auto write_sums = [&](real* partials, int begin, const wide(*sums)[WIDES]) LAMBDA {
        UNROLL for (int p = 0; p < BATCH; ++p) write_sum(partials, begin + p, sums[p]);
    };
    const auto write_result = [&](real* results, int p, const wide* sum) LAMBDA {
        element<DWEIGHT>* const row = reinterpret_cast<element<DWEIGHT>*>(results) + int64(at.head) * COLS;
        store<DWEIGHT, 1>(row, at.col(p), COLS, packed<DWEIGHT>(sum));
    };
    constexpr int SUMS_COUNT = SUMS_IN_SHARED * PACKS * SUMS_OF_PACK * THREADS, STASH_COUNT = STASHED * THREADS;
    DYNAMIC_SHARED(Sums, shared_sums, 0, SUMS_COUNT);
    DYNAMIC_SHARED(Pack<X>, stash_x, SUMS_COUNT * sizeof(Sums), STASH_COUNT);
    DYNAMIC_SHARED(Pack<DOUT>, stash_dout, SUMS_COUNT * sizeof(Sums) + STASH_COUNT * sizeof(Pack<X>), STASH_COUNT);
    const auto read_shared = [&](int p, wide* sums) LAMBDA {
        UNROLL for (int i = 0; i < SUMS_OF_PACK; ++i) {
            const Sums from = shared_sums[(p * SUMS_OF_PACK + i) * THREADS + thread_index()];
            UNROLL for (int k = 0; k < SUMS; ++k) reinterpret_cast<real*>(sums)[i * SUMS + k] = from.at[k];
        }
    };
    const auto write_shared = [&](int p, const wide* sums) LAMBDA {
        UNROLL for (int i = 0; i < SUMS_OF_PACK; ++i) {
            Sums to;
            UNROLL for (int k = 0; k < SUMS; ++k) to.at[k] = reinterpret_cast<const real*>(sums)[i * SUMS + k];
            shared_sums[(p * SUMS_OF_PACK + i) * THREADS + thread_index()] = to;
        }
    };
    if constexpr (SUMS_IN_SHARED) {
        for (int p = 0; p < PACKS; ++p) write_shared(p, dw[0]);
    }
    if constexpr (!ROW_STAYS) {  // the memory is no one's: each block starts from zeros of its own
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
    const auto fetch_pack = [&](int64 i, int p) LAMBDA {
        if (i >= at.end) return;
        const int64 row = at.row(i);
        const int to = p * THREADS + thread_index();
        fetch<X>(stash_x[to], x + row * x_pitch, at.col(p), COLS);
        fetch<DOUT>(stash_dout[to], dout + row * dout_pitch, at.col(p), COLS);
    };
    const auto read_stash = [&](int p, Input& to) LAMBDA {
        to.x = stash_x[p * THREADS + thread_index()];
        to.dout = stash_dout[p * THREADS + thread_index()];
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
        return RowInput{there ? rstd[row] : real(0), MEAN_GIVEN && there ? means[row] : real(0)};
    };
    RowInput of_row, of_next;
    const auto values_of = [&](const Input& in, wide* normed, wide* d) LAMBDA {
        unpack<X>(in.x, normed);
        unpack<DOUT>(in.dout, d);
        UNROLL for (int k = 0; k < WIDES; ++k) normed[k] *= of_row.rstd;
    };
    const auto gradient = [&](const Pack<WEIGHT>& w, const wide* d, wide* g) LAMBDA {
        wide factor[WIDES];
        if constexpr (WEIGHT != NONE) unpack<WEIGHT>(w, factor);
        UNROLL for (int k = 0; k < WIDES; ++k) {
            if constexpr (OFFSET_WEIGHT) factor[k] += weight_offset;
            g[k] = WEIGHT != NONE ? d[k] * factor[k] : d[k];
        }
    };

    Input in[SLOTS], next[PREFETCH ? BATCH : 1];
    Pack<WEIGHT> w[SLOTS];
    wide normed[SLOTS][WIDES], d[SLOTS][WIDES], added[SLOTS][WIDES];
    const auto load_next = [&](int64 i) LAMBDA {
        if (PREFETCH && i < at.end) {
            at.renew();
            of_next = load_row_input(i);
            UNROLL for (int p = 0; p < BATCH; ++p) {
                load_pack(i, p, next[p]);
                load_added(i, p, next[p]);
            }
        }
    };
    // One pack ahead of its use, and no sooner: registers. `slot` is that of the pack begin + p.
    Pack<WEIGHT> next_weight;
    const auto load_late_weight = [&](int begin, int p, int slot) LAMBDA {
        if constexpr (STASHED > 0) {  // and from row to row: the weight is too large for L1
            w[slot] = next_weight;
            load_weight(begin + p + 1 < PACKS ? begin + p + 1 : 0, next_weight);
        } else if constexpr (!EARLY_WEIGHT) {
            if (p == 0) load_weight(begin, w[0]);
            if (p + 1 < BATCH) load_weight(begin + p + 1, w[p + 1]);
        }
    };
    const auto add_products = [&](int slot, wide* lanes) LAMBDA {
        wide g[WIDES];
        if constexpr (!VALUES_KEPT) values_of(in[slot], normed[slot], d[slot]);
        gradient(w[slot], d[slot], g);
        UNROLL for (int k = 0; k < WIDES; ++k) {
            lanes[k % ACCUMULATORS] = madd(g[k], normed[slot][k], lanes[k % ACCUMULATORS]);
        }
    };
    if constexpr (EARLY_WEIGHT) {
        UNROLL for (int p = 0; p < BATCH; ++p) load_weight(p, w[p]);
    }
    load_next(at.first);
    Input next_added[BATCH];
    if constexpr (STASHED > 0) {
        of_next = load_row_input(at.first);
        load_weight(0, next_weight);
        UNROLL for (int p = 0; p < STASHED; ++p) fetch_pack(at.first, p);
    }
    int turn = 0;
    for (int64 i = at.first; i < at.end; i += at.step, ++turn) {
        const int64 row = at.row(i + at.row_in_block);
        const int cols = ROWS_PER_BLOCK == 1 || i + at.row_in_block < at.end ? COLS : 0;
        if constexpr (PREFETCH) {
            of_row = of_next;
            of_row.rstd = plain_nan(of_row.rstd);
            UNROLL for (int p = 0; p < BATCH; ++p) in[p] = next[p];
        } else {
            of_row = STASHED > 0 ? of_next : load_row_input(i);
            of_row.rstd = plain_nan(of_row.rstd);
            if constexpr (ROW_STAYS) {
                UNROLL for (int p = 0; p < LASTING; ++p) load_pack(i, STASHED + p, in[p]);
            }
        }
        // The row's packs are unpacked before the next ones come, which then take their registers.
        if constexpr (VALUES_KEPT) {
            UNROLL for (int p = 0; p < BATCH; ++p) {
                values_of(in[p], normed[p], d[p]);
                if constexpr (ADDED_KEPT) unpack<DRESIDUAL_OUT>(in[p].dresidual_out, added[p]);
                UNROLL for (int k = 0; k < WIDES; ++k) {
                    settle(normed[p][k]);
                    settle(d[p][k]);
                    if constexpr (ADDED_KEPT) settle(added[p][k]);
                }
            }
        }
        load_next(i + at.step);

        real mean = of_row.mean;
        if constexpr (SUM_HERE) {
            real total = 0;
            if constexpr (STASHED > 0) {
                of_next = load_row_input(i + at.step);
                fetched();
            }
            for (int section = 0; section < PACKS; section += SECTION) {
                wide lanes[ACCUMULATORS] = {};
                const int end = smaller(PACKS - PASSING, section + SECTION);
                ROLLED for (int begin = section; begin < end; begin += BATCH) {
                    UNROLL for (int p = 0; p < BATCH; ++p) {
                        if constexpr (STASHED > 0) {
                            read_stash(begin + p, in[PASSING + p]);
                        } else if constexpr (!ROW_STAYS) {
                            load_pack(i, begin + p, in[p]);
                        }
                    }
                    UNROLL for (int p = 0; p < BATCH; ++p) {
                        load_late_weight(begin, p, PASSING + p);
                        add_products(PASSING + p, lanes);
                    }
                }
                UNROLL for (int p = 0; p < PASSING; ++p) {
                    load_late_weight(STASHED, p, p);
                    add_products(p, lanes);
                }
                total += fold(lanes);
            }
            if constexpr (ADDED_DURING_SUM) {  // and no sooner: registers
                UNROLL for (int p = 0; p < BATCH; ++p) load_added(i, p, in[PASSING + p]);
                UNROLL for (int p = 0; p < PASSING; ++p) load_added(i, STASHED + p, in[p]);
            }
            mean = row_sum(total, turn) / COLS;
            if constexpr (UNPACK_AGAIN) {
                const uint32 zero = unknown_zero(mean);
                UNROLL for (int p = 0; p < LASTING; ++p) {
                    forget_values<X>(in[p].x, zero);
                    forget_values<DOUT>(in[p].dout, zero);
                    if constexpr (WEIGHT != NONE) forget_values<WEIGHT>(w[p], zero);
                }
            }
        }
        at.renew();
        if constexpr (MEAN_ONLY) {
            if (at.is_first_thread() && cols) means[row] = mean;
            continue;
        }

        // With the pack begin + p, which is in `slot`, now that the row's mean is known.
        const auto finish = [&](int begin, int p, int slot) LAMBDA {
            const int pack = begin + p;
            if constexpr (NEED_DX) load_late_weight(begin, p, slot);
            if constexpr (ADDED_AHEAD) {
                if (p == 0) load_added(i, begin, in[0]);
                if (p + 1 < BATCH) load_added(i, pack + 1, in[p + 1]);
            }
            if constexpr (!VALUES_KEPT) values_of(in[slot], normed[slot], d[slot]);
            wide* const sums = dw[SUMS_IN_SHARED || STASHED > 0 ? 0 : p];
            if constexpr (SUMS_IN_SHARED) read_shared(pack, sums);
            UNROLL for (int k = 0; k < WIDES; ++k) {
                if constexpr (NEED_DWEIGHT) sums[k] = madd(d[slot][k], normed[slot][k], sums[k]);
                if constexpr (NEED_DBIAS) db[p][k] += d[slot][k];
            }
            if constexpr (SUMS_IN_SHARED) write_shared(pack, sums);
            if constexpr (NEED_DX) {
                wide v[WIDES];
                gradient(w[slot], d[slot], v);
                UNROLL for (int k = 0; k < WIDES; ++k) {
                    v[k] = of_row.rstd * madd(-normed[slot][k], spread(mean), v[k]);
                }
                if constexpr (DRESIDUAL_OUT != NONE) {
                    if constexpr (!ADDED_KEPT) unpack<DRESIDUAL_OUT>(in[slot].dresidual_out, added[slot]);
                    UNROLL for (int k = 0; k < WIDES; ++k) v[k] += added[slot][k];
                }
                store<DX>(dx + row * dx_pitch, at.col(pack), cols, packed<DX>(v));
                if constexpr (DRESIDUAL != NONE) {  // only where its dtype is not dx's, or a second array is wanted
                    store<DRESIDUAL>(dresidual + row * dresidual_pitch, at.col(pack), cols, packed<DRESIDUAL>(v));
                }
            }
        };
        for (int begin = 0; begin < PACKS - PASSING; begin += BATCH) {
            UNROLL for (int p = 0; p < BATCH; ++p) {
                if constexpr (STASHED > 0) {
                    if (begin + BATCH < STASHED) load_added(i, begin + BATCH + p, next_added[p]);
                } else if constexpr (!ROW_STAYS) {
                    load_pack(i, begin + p, in[p]);
                }
                if constexpr (!PREFETCH && !ADDED_DURING_SUM && !ADDED_AHEAD) load_added(i, begin + p, in[p]);
            }
            if constexpr (!ROW_STAYS) {
                if constexpr (NEED_DWEIGHT) read_sums(dweight_row, begin, dw);
                if constexpr (NEED_DBIAS) read_sums(dbias_row, begin, db);
            }
            UNROLL for (int p = 0; p < BATCH; ++p) {
                if constexpr (STASHED > 0) read_stash(begin + p, in[PASSING + p]);
                finish(begin, p, PASSING + p);
                if constexpr (STASHED > 0) {
                    fetch_pack(i + at.step, begin + p);
                    in[PASSING + p].dresidual_out = next_added[p].dresidual_out;
                }
            }
            if constexpr (!ROW_STAYS) {
                if constexpr (NEED_DWEIGHT) write_sums(dweight_row, begin, dw);
                if constexpr (NEED_DBIAS) write_sums(dbias_row, begin, db);
            }
        }
        UNROLL for (int p = 0; p < PASSING; ++p) finish(STASHED, p, p);
        if constexpr (PREFETCH) {
            UNROLL for (int p = 0; p < BATCH; ++p) settle_input(next[p]);
        }
    }

    if constexpr (SUMS_IN_SHARED) {
        for (int p = 0; p < PACKS; ++p) {
            read_shared(p, dw[0]);
            if constexpr (DIRECT) write_result(dweight_partials, p, dw[0]);
            if constexpr (!DIRECT) write_sum(dweight_row, p, dw[0]);
        }
    } else if constexpr (ROW_IN_REGISTERS) {
        if constexpr (NEED_DWEIGHT) block_sum<ROWS_PER_BLOCK>(dw);
        if constexpr (NEED_DBIAS) block_sum<ROWS_PER_BLOCK>(db);
        if (at.row_in_block == 0) {
            UNROLL for (int p = 0; p < BATCH; ++p) {
                if constexpr (NEED_DWEIGHT && DIRECT) write_result(dweight_partials, p, dw[p]);
                if constexpr (NEED_DBIAS && DIRECT) write_result(dbias_partials, p, db[p]);
                if constexpr (NEED_DWEIGHT && !DIRECT) write_sum(dweight_row, p, dw[p]);
                if constexpr (NEED_DBIAS && !DIRECT) write_sum(dbias_row, p, db[p]);
            }
        }
    }
}
