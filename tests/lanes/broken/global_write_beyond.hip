// The last thread writes one element too far.

KERNEL global_write_beyond(const real* x, real* y, int blocks) {
    const int thread = thread_index();
    y[thread] = x[thread];
    if (thread == THREADS - 1) {
        y[thread + 1] = x[thread];  // FAULT
    }
}
