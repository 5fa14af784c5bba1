// What lanes.h makes of the AMD moves: each row of y, one lane's number (or the old value, 100 more) after each move.

KERNEL moves(const real* x, real* y, int blocks) {
    const int lane = thread_index() % WAVE;
    if (thread_index() >= WAVE) return;
    y[0 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x1b, 0xf, 0xf, false);   // quad_perm [3,2,1,0]
    y[1 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x111, 0xf, 0xf, false);  // row_shr:1
    y[2 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x111, 0xf, 0xf, true);   // with bound_ctrl:0
    y[3 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x102, 0x2, 0xf, false);  // row_shl:2 in row 1
    y[4 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x124, 0xf, 0x5, false);  // row_ror:4, banks 0,2
    y[5 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x140, 0xf, 0xf, false);  // row_mirror
    y[6 * WAVE + lane] = __builtin_amdgcn_update_dpp(lane + 100, lane, 0x141, 0xf, 0xf, false);  // row_half_mirror
    y[7 * WAVE + lane] = __builtin_amdgcn_readlane(lane, 17);
    y[8 * WAVE + lane] = __builtin_amdgcn_ds_swizzle(lane, 0x401f);  // xor 16
    y[9 * WAVE + lane] = __builtin_amdgcn_ds_swizzle(lane, 0x0018);  // the first of each 8
}
