// Without a fault: each width of wave_sum, and barriers between branches that depend on the thread.

KERNEL sound(const real* x, real* sums, real* y, int blocks) {
    SHARED real slots[THREADS];
    const int thread = thread_index();
    real* row = sums + (int64(block_index()) * THREADS + thread) * 7;
    row[0] = wave_sum<1>(x[thread]);
    row[1] = wave_sum<2>(x[thread]);
    row[2] = wave_sum<4>(x[thread]);
    row[3] = wave_sum<8>(x[thread]);
    row[4] = wave_sum<16>(x[thread]);
    row[5] = wave_sum<32>(x[thread]);
    row[6] = wave_sum<WAVE>(x[thread]);

    real v = x[thread];
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (thread >= half && thread < 2 * half) slots[thread] = v;
        sync();
        if (thread < half) v += slots[thread + half];
        sync();
    }
    if (thread > 0) return;
    y[block_index()] = v;
}
