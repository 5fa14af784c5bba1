"""What is allowed of a kernel's code object and assembly, given its plan: one complaint for each rule that it breaks.

Knows: plans, and the facts and listings of codeobject.
Must not: compile.
"""

from __future__ import annotations

from rmsnorm_raw.codeobject import Facts, Listing, unit_of
from rmsnorm_raw.plan import SIZES, Constants, Plan

SPARE = 0.9  # of the registers that the planned residency leaves, at most so much is used
LDS_BYTES = 64 << 10


def complaints(plan: Plan, arch: str, facts: Facts, listing: Listing) -> list[str]:
    return [*resources(plan, arch, facts), *accesses(plan, listing), *flow(plan, listing), *contraction(plan, listing)]


def is_fast(constants: Constants) -> bool:
    """Whether rows are whole packs that one access reaches."""
    return constants.vector == constants.pack and constants.cols % constants.pack == 0


def resources(plan: Plan, arch: str, facts: Facts):
    constants, unit = plan.constants, unit_of(arch)
    if facts.vgpr_spills or facts.sgpr_spills:
        yield f"spills: {facts.vgpr_spills} VGPRs, {facts.sgpr_spills} SGPRs"
    if facts.scratch_bytes:
        yield f"scratch: {facts.scratch_bytes} bytes"
    if facts.agprs:
        yield f"AGPRs: {facts.agprs}, which no kernel asks for"
    if facts.lds_bytes >= LDS_BYTES or facts.lds_bytes * constants.blocks_per_unit > unit.lds_bytes:
        yield f"LDS: {facts.lds_bytes} bytes, {constants.blocks_per_unit} blocks a unit"
    if facts.block != plan.threads:
        yield f"block: compiled for {facts.block} threads, launched with {plan.threads}"
    if facts.wave != constants.wave:
        yield f"wave: {facts.wave} lanes, planned {constants.wave}"
    resident = unit.waves_by_vgprs(int(facts.vgprs / SPARE)) * unit.simds // -(-plan.threads // constants.wave)
    if resident < constants.blocks_per_unit:
        yield f"VGPRs: {facts.vgprs} leave room for {resident} blocks a unit, planned {constants.blocks_per_unit}"


def accesses(plan: Plan, listing: Listing):
    constants = plan.constants
    for one in listing:
        if one.name.startswith(("flat_", "scratch_")):
            yield f"accesses: {one.name}, which is neither global memory nor LDS"
    if not is_fast(constants):
        return
    # 16 bytes, but a pack of a narrower dtype than the normed one has fewer.
    operands = ("x", "residual", "weight", "bias", "y", "residual_out", "dout", "dresidual_out", "dx", "dresidual")
    dtypes = {getattr(constants, name) for name in operands} - {None}
    wide = {min(16, constants.pack * SIZES[dtype]) for dtype in dtypes} | {16}
    narrow_loads, narrow_stores = narrow_accesses(plan)
    loads, stores = listing.widths()
    if plan.kernel == "dweight_reduce" and loads[16] < constants.batch:
        yield f"accesses: {loads[16]} loads of 16 bytes, {constants.batch} packs of partials"
    for what, counts, allowed in (("load", loads, narrow_loads), ("store", stores, narrow_stores)):
        for size, count in counts.items():
            if size not in wide and count > allowed.get(size, 0):
                yield f"accesses: {count} {what}s of {size} bytes, allowed {allowed.get(size, 0)}"


def narrow_accesses(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """How many narrow loads and stores of each size a kernel needs: rstd, means, and dweight itself, whose rows may lie
    at any address."""
    constants = plan.constants
    real = SIZES[constants.compute]
    if plan.kernel == "rmsnorm_fwd":
        return {}, {real: 1}
    if plan.kernel == "dweight_reduce":
        return {}, {SIZES[constants.weight or constants.compute]: constants.pack}
    loads = (1 + constants.mean_given) * (1 + constants.prefetch)
    stores = {real: 1} if constants.mean_only else {}
    if constants.direct:
        size = SIZES[getattr(constants, "dweight", None) or constants.weight or constants.compute]
        stores = {size: constants.pack * constants.batch * (constants.need_dweight + constants.need_dbias)}
    return {real: loads}, stores


def flow(plan: Plan, listing: Listing):
    constants = plan.constants
    barriers = sum(one.is_barrier for one in listing.main_loop)
    allowed = 1 if constants.threads_per_row > constants.wave else 0
    if plan.kernel != "dweight_reduce" and barriers > allowed:
        yield f"barriers: {barriers} a row, allowed {allowed}"
    if listing.unwaited_barriers():
        yield f"fences: {listing.unwaited_barriers()} barriers are reached with LDS stores under way"
    atomics = sorted({one.name for one in listing if one.is_atomic})
    if atomics:
        yield f"atomics: {', '.join(atomics)}"
    if listing.polling():
        yield f"polling: {listing.polling()[0].name} inside a loop"
    if plan.kernel == "dweight_reduce" and listing.scalar_data_loads():
        yield f"scalar loads: {listing.scalar_data_loads()[0].name} of partials"


def contraction(plan: Plan, listing: Listing):
    """Only where every sum and product of the text stands once in the code, and no division adds fmas of its own."""
    constants = plan.constants
    cols = constants.cols
    if constants.compute == "float64" or cols == 0 or cols & (cols - 1) or constants.kept < constants.packs:
        return
    values = constants.pack * constants.packs
    if plan.kernel == "rmsnorm_fwd":
        written = 1 + (constants.bias is not None and constants.weight is not None and not constants.llama)
    else:
        sum_here = constants.mean_only or (constants.need_dx and not constants.mean_given)
        written = sum_here + constants.need_dx + constants.need_dweight
    fmas = sum(one.fmas for one in listing)
    if fmas > written * values:
        yield f"contraction: {fmas} fused multiply-adds, the text has {written * values}"
