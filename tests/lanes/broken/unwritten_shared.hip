// The last slot of shared memory is read, and nobody has written it.

KERNEL unwritten_shared(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS + 1];
    const int thread = thread_index();
    slots[thread] = x[thread];
    sync();
    y[thread] = slots[thread] + slots[thread + 1];  // FAULT
}
