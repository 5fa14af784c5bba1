// A slot of another wave is read without a barrier behind its write.

KERNEL missing_barrier(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS];
    const int thread = thread_index();
    slots[thread] = x[thread];  // FAULT
    y[thread] = slots[THREADS - 1 - thread];  // FAULT
}
