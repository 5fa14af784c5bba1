// A thread leaves before a barrier that the others wait at.

KERNEL early_return(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS];
    const int thread = thread_index();
    if (thread == 5) return;
    slots[thread] = x[thread];
    sync();  // FAULT
    y[thread] = slots[thread];
}
