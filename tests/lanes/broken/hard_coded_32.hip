// Right where a wave has 32 lanes. Where it has 64, half of the slots are never written.

KERNEL hard_coded_32(const real* x, real* y, int blocks) {
    SHARED real slots[THREADS / 32];
    const int thread = thread_index();
    const real v = wave_sum<WAVE>(x[thread]);
    if (thread % WAVE == 0) slots[thread / WAVE] = v;
    sync();
    real total = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        total += slots[i];  // FAULT
    }
    y[thread] = total;
}
