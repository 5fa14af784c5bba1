// Half of the block waits at one barrier, half at another.

KERNEL divergent_barrier(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS];
    const int thread = thread_index();
    if (thread < THREADS / 2) {
        slots[thread] = x[thread];
        sync();  // FAULT
    } else {
        slots[thread] = 2 * x[thread];
        sync();  // FAULT
    }
    y[thread] = slots[THREADS - 1 - thread];
}
