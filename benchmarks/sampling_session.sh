#!/usr/bin/env bash
# What sampling needs from a GPU, each part with a time limit of its own:
#   sampling_session.sh PART...   parts: tests speed architectures matrix
# Results go to $OUT (default: the working directory); a part that ends early keeps what it has. The probe of sampled and
# structured requests is attention_session.sh's.
set -u
out=${OUT:-.}
# What is told to end stops its servers, which takes it some seconds: pytest at INT.
run() { timeout -s "${SIGNAL:-TERM}" -k 25 "$1" "${@:2}" 2>&1 | tail -"${LINES_KEPT:-60}"; }
pytests() { SIGNAL=INT SGL_DET_TEST_OUT="$out" run "$1" python3 -m pytest -p no:benchmark -p no:cacheprovider -q -rA --tb=short -m gpu "${@:2}"; }
for part in "$@"; do
    echo "== $part $(date +%T)"
    case "$part" in
    tests) pytests 200 -n 8 tests/kernels/test_gpu_sampler.py tests/kernels/test_sampler_proof.py ;;
    speed) run 100 python3 -W ignore benchmarks/bench_sampler.py --out "$out/sampler.jsonl" --seconds 85 ;;
    architectures) pytests 330 -n 6 tests/server/test_architectures.py ;; # servers side by side
    matrix) pytests 420 tests/server/test_sampling_matrix.py ;;
    *) echo "unknown part $part" >&2 ;;
    esac
done
