// Written before a barrier, read behind it, but written again ahead of the next one: a slow thread reads the new value.

KERNEL barrier_too_late(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS];
    const int thread = thread_index();
    slots[thread] = x[thread];
    sync();
    const real other = slots[THREADS - 1 - thread];  // FAULT
    slots[thread] = 2 * x[thread];  // FAULT
    sync();
    y[thread] = other + slots[THREADS - 1 - thread];
}
