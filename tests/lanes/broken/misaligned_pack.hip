// A pack is stored one element off its alignment.

KERNEL misaligned_pack(const real* x, real* y, int blocks) {
    const int thread = thread_index();
    y[thread] = x[thread];
    if (thread == 0) {
        copy<PACK>(y + 1, x);  // FAULT
    }
}
