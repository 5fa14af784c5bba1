// What the kernel declares const is written all the same.

KERNEL input_written(const real* x, real* y, int blocks) {
    const int thread = thread_index();
    y[thread] = x[thread];
    const_cast<real*>(x)[thread] = 0;  // FAULT
}
