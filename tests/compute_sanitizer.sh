#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over tests/gpu_suite.py: memory, races in shared memory, uninitialised reads, barriers.
# Prints one summary a tool; exits non-zero if one of them found something. Needs a GPU and CuPy.
set -u
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/.." CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-/tmp/rmsnorm_raw_sanitizer}"
python3 gpu_suite.py >/dev/null || exit 1 # right without a tool first; also fills the compile cache
status=0
for tool in memcheck racecheck initcheck synccheck; do
    # Only this package's kernels: CuPy's own (casts, comparisons) are not what is tested.
    log=$(compute-sanitizer --tool "$tool" --kernel-name regex=rmsnorm --kernel-name regex=dweight \
        --error-exitcode 9 python3 gpu_suite.py 2>&1) || status=1
    printf '%-10s %s\n' "$tool" "$(printf '%s\n' "$log" | grep -E 'SUMMARY|right' | tr '\n' ' ')"
done
exit $status
