// dweight = Σ over the backward's blocks of their partials, cast to the weight's dtype; dbias likewise.
//
// A block sums a tile of THREADS_PER_ROW packs of columns. Its row groups take every ROWS_PER_BLOCK-th row of partials,
// and the first group adds up the groups: a fixed order. Columns are given at run time, so that one program serves all N.

KERNEL dweight_reduce(const real* partials, element<WEIGHT>* dweight, int64 partials_rows, int64 partials_pitch,
                      int64 heads, int cols, int blocks) {
    const int thread = thread_index() % THREADS_PER_ROW, group = thread_index() / THREADS_PER_ROW;
    const int tiles = blocks / heads, head = block_index() / tiles;
    const int col = (block_index() % tiles * THREADS_PER_ROW + thread) * PACK;
    const int padded = (cols + PACK - 1) / PACK * PACK;

    real sums[PACK] = {};
    for (int64 k = group; k < partials_rows; k += ROWS_PER_BLOCK) {
        // Row k of this head: the backward deals blocks to heads in turn.
        real values[PACK];
        unpack<COMPUTE>(load<COMPUTE>(partials + (k * heads + head) * partials_pitch, col, padded), values);
        UNROLL for (int i = 0; i < PACK; ++i) sums[i] += values[i];
    }
    if constexpr (ROWS_PER_BLOCK > 1) {
        SHARED real groups[ROWS_PER_BLOCK][PACK][THREADS_PER_ROW];
        UNROLL for (int i = 0; i < PACK; ++i) groups[group][i][thread] = sums[i];
        sync();
        if (group > 0) return;
        for (int other = 1; other < ROWS_PER_BLOCK; ++other) {
            UNROLL for (int i = 0; i < PACK; ++i) sums[i] += groups[other][i][thread];
        }
    }
    store<WEIGHT, 1>(dweight + int64(head) * cols, col, cols, packed<WEIGHT>(sums));
}
