// A DPP control that GFX9 has and RDNA has not.

KERNEL row_broadcast(const real* x, real* y, int blocks) {
    const int thread = thread_index();
    const uint32 bits = as_bits(x[thread]);
    y[thread] = as_float(__builtin_amdgcn_update_dpp(bits, bits, 0x142, 0xf, 0xf, false));  // FAULT
}
