#!/usr/bin/env bash
# What the attention of all three backends needs from a GPU, each part with a time limit of its own:
#   attention_session.sh PART...   parts: tests kernels retraction probe server-fa3 server-triton server-flashinfer capacity
# Results go to $OUT (default: the working directory); a part that ends early keeps what it has.
# SUITE=full, or WORKLOADS=A,B,..., measures those instead of `sgl-det bench`'s quick suite; what lies in the
# committed e2e.json under the same key is left out of the full one. MODEL is another model than qwen3-8b.
# BACKENDS="A B" are those of kernels, probe and capacity.
set -u
out=${OUT:-.}
model=${MODEL:-qwen3-8b}
backends=${BACKENDS:-fa3 triton flashinfer}
# What is told to end stops its servers, which takes it some seconds: a script at TERM, pytest at INT.
run() { timeout -s "${SIGNAL:-TERM}" -k 25 "$1" "${@:2}" 2>&1 | tail -"${LINES_KEPT:-40}"; }
pack() { (cd "$out" && files=$(ls $2 2>/dev/null); [ -n "$files" ] && tar cJf "$1.tar.xz" $files && rm -f $files); }
for part in "$@"; do
    echo "== $part $(date +%T)"
    case "$part" in
    tests) SIGNAL=INT run 200 python3 -m pytest -p no:benchmark -p no:cacheprovider -q --tb=short -m gpu -n 12 tests/kernels/test_tiles.py \
        tests/kernels/test_attention.py tests/kernels/test_attention_proof.py tests/kernels/test_cublaslt.py tests/kernels/test_merge_chunks.py ;;
    kernels)
        for backend in $backends; do
            run 70 python3 -W ignore benchmarks/bench_attention.py --backend $backend --out "$out/attention-$backend.jsonl" --seconds 60
        done
        run 100 python3 -W ignore benchmarks/check_fa3.py --out "$out/check-fa3.jsonl" --seconds 85
        run 115 python3 -W ignore benchmarks/check_phases.py --out "$out/check-phases.jsonl" --seconds 100 ;;
    retraction)
        SIGNAL=INT SGL_DET_TEST_OUT="$out" run 300 python3 -m pytest -p no:benchmark -p no:cacheprovider -q -rA --tb=short -m gpu tests/server/test_retraction.py
        pack retraction-logs "retraction-*.log" ;;
    probe) # three servers side by side, each under its own full probe
        mkdir -p "$out/probe"
        python3 -c "from sgl_det.make_model import resolve_model; resolve_model('$model')"
        for backend in $backends; do
            timeout -k 25 400 python3 -W ignore benchmarks/axes.py --model "$model" --run $backend:sgl_det --seconds 370 \
                --out "$out/probe" >"$out/probe/$backend.out" 2>&1 &
        done
        wait
        for backend in $backends; do tail -n "${LINES_KEPT:-40}" "$out/probe/$backend.out"; done
        pack probe-logs "probe/*.log probe/*.out" ;;
    server-fa3 | server-triton | server-flashinfer)
        backend=${part#server-}
        cp -n benchmarks/results/nvidia-h200/e2e.json "$out/"
        run 575 python3 -W ignore benchmarks/bench_$backend.py --model "$model" --seconds "${SECONDS_EACH:-540}" \
            --suite "${SUITE:-quick}" ${WORKLOADS:+--workloads "$WORKLOADS"} --out "$out"
        pack "$part-logs" "$backend.*.log" ;;
    capacity) for backend in $backends; do
        run 260 python3 -W ignore benchmarks/bench_$backend.py --model "$model" --workloads "" --capacity --out "$out"
    done ;;
    *) echo "unknown part $part" >&2 ;;
    esac
done
