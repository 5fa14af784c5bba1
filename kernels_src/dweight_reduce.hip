// dweight = Σ over the backward's blocks of their partials, cast to the weight's dtype; dbias likewise.
//
// A block sums a tile of THREADS_PER_ROW packs of columns: each of its row groups takes every ROWS_PER_BLOCK-th row of
// partials, BATCH of them in flight, and then the groups are added: a fixed order. Columns are given at run time, so
// that one program serves all N.

KERNEL dweight_reduce(const real* partials, element<WEIGHT>* dweight, int64 partials_rows, int64 partials_pitch,
                      int64 heads, int cols, int blocks) {
    const int thread = thread_index() % THREADS_PER_ROW, group = thread_index() / THREADS_PER_ROW;
    const int tiles = blocks / heads, head = block_index() / tiles;
    const int tile_col = block_index() % tiles * (THREADS_PER_ROW * PACK);
    const int padded = (cols + PACK - 1) / PACK * PACK;

    wide sums[WIDES] = {};
    for (int64 k = group; k < partials_rows; k += ROWS_PER_BLOCK * BATCH) {
        Pack<COMPUTE> rows[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            // Row k of this head: the backward deals blocks to heads in turn.
            const int64 row = k + b * ROWS_PER_BLOCK;
            const real* from = partials + (row * heads + head) * partials_pitch;
            rows[b] = load<COMPUTE>(from, tile_col + thread * PACK, row < partials_rows ? padded : 0);
        }
        UNROLL for (int b = 0; b < BATCH; ++b) {
            wide values[WIDES];
            unpack<COMPUTE>(rows[b], values);
            UNROLL for (int i = 0; i < WIDES; ++i) sums[i] += values[i];
        }
    }
    if constexpr (ROWS_PER_BLOCK == 1) {
        store<WEIGHT, 1>(dweight + int64(head) * cols, tile_col + thread * PACK, cols, packed<WEIGHT>(sums));
    } else {
        SHARED real groups[ROWS_PER_BLOCK][THREADS_PER_ROW * PACK];
        UNROLL for (int i = 0; i < WIDES; ++i) reinterpret_cast<wide*>(groups[group])[thread * WIDES + i] = sums[i];
        sync();
        for (int col = thread_index(); col < THREADS_PER_ROW * PACK; col += THREADS) {
            real total = 0;
            UNROLL for (int other = 0; other < ROWS_PER_BLOCK; ++other) total += groups[other][col];
            if (tile_col + col < cols) dweight[int64(head) * cols + tile_col + col] = narrow<WEIGHT>(total);
        }
    }
}
