// One slot too few in shared memory.

KERNEL shared_out_of_bounds(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS - 1];
    real* volatile start = slots;  // so that the compiler does not see the bounds, only AddressSanitizer does
    const int thread = thread_index();
    start[thread] = x[thread];  // FAULT
    sync();
    y[thread] = start[thread];
}
