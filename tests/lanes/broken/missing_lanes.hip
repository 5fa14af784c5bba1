// Only the lower lanes of a wave take part in a shuffle.

KERNEL missing_lanes(const real* x, real* y, int blocks) {
    real v = x[thread_index()];
    if (thread_index() % WAVE < 16) {
        v = wave_sum<16>(v);  // FAULT
    }
    y[thread_index()] = v;
}
