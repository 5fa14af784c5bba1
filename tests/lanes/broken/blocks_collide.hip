// Two blocks write the same element; no barrier orders blocks.

KERNEL blocks_collide(const real* x, real* y, int blocks) {
    const int thread = thread_index();
    y[thread] = x[thread] + block_index();  // FAULT
}
