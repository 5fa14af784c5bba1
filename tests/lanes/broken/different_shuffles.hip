// The lanes of a wave shuffle at two places of the text.

KERNEL different_shuffles(const real* x, real* y, int blocks) {
    real v = x[thread_index()];
    if (thread_index() % 2 == 0) {
        v = 3 * wave_sum<2>(v);  // FAULT
    } else {
        v = 5 * wave_sum<2>(v);  // FAULT
    }
    y[thread_index()] = v;
}
