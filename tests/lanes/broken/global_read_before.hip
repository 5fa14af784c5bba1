// The first thread reads the element ahead of its row.

KERNEL global_read_before(const real* x, real* y, int blocks) {
    const int thread = thread_index();
    y[thread] = x[thread - 1] + x[thread];  // FAULT
}
