#!/usr/bin/env bash
# What the linear and norm layers need from a GPU, each part with a time limit of its own:
#   kernels_session.sh PART...   parts: tests linear shards norms deep_gemm proof server audit forced attention tune
# Results go to $OUT (default: the working directory); a part that ends early keeps what it has.
set -u
out=${OUT:-.}
run() { timeout "$1" "${@:2}" 2>&1 | tail -"${LINES_KEPT:-40}"; }
for part in "$@"; do
    echo "== $part"
    case "$part" in
    tests) # compiling takes most of the time: a process a file
        for file in $(grep -lE "MARKS|mark.gpu" tests/kernels/test_*.py); do
            timeout 280 python3 -m pytest -p no:cacheprovider -q --tb=short -m gpu --durations=5 "$file" >"$out/$(basename "$file" .py).out" 2>&1 &
        done
        wait
        tail -qn 2 "$out"/test_*.out
        tar cJf "$out/tests.tar.xz" -C "$out" $(cd "$out" && ls test_*.out) && rm "$out"/test_*.out ;;
    linear) for dtype in bf16 fp16; do
        run 120 python3 -W ignore benchmarks/bench_kernels.py --out "$out/linear-$dtype.jsonl" --dtype $dtype --skip deep_gemm --seconds 110
    done ;;
    shards) for dtype in bf16 fp16; do
        run 190 python3 -W ignore benchmarks/bench_kernels.py --out "$out/shards-$dtype.jsonl" --dtype $dtype --tp 2,4,8 --skip deep_gemm --seconds 180
    done ;;
    norms) run 130 python3 -W ignore benchmarks/bench_norms.py --out "$out/norms.jsonl" --dtype bf16,fp16 --seconds 120 ;;
    deep_gemm) run 130 python3 -W ignore benchmarks/bench_kernels.py --out "$out/deep_gemm.jsonl" --models qwen3-8b --rows 16,64,128,192,256,1024,8192 --only deep_gemm --seconds 110 ;;
    proof) run 120 python3 -W ignore benchmarks/bench_proof.py --out "$out/proof.json" ;;
    server) run 570 python3 -W ignore benchmarks/bench_fa3.py --out "$out" ;;
    audit) for backend in fa3 triton flashinfer; do
        timeout 280 python3 -W ignore -m sgl_det.launch_server --det-audit "$out/audit-$backend.json" --model-path qwen3-8b \
            --attention-backend $backend --max-total-tokens 60000 --mem-fraction-static 0.9 --skip-server-warmup \
            --disable-prefill-cuda-graph >"$out/audit-$backend.out" 2>&1 &
    done
    wait
    tail -n 60 "$out"/audit-*.out ;;
    forced) run 400 python3 -m pytest -p no:cacheprovider -v -rA --tb=short -m gpu --basetemp "$out/forced" tests/server/test_linear_gpu.py ;;
    attention) run 150 python3 -m pytest -p no:cacheprovider -q --tb=short -m gpu -n 8 tests/kernels/test_attention.py tests/kernels/test_attention_proof.py ;;
    tune) run 170 python3 -W ignore benchmarks/tune_attention.py --out "$out/tune.jsonl" --seconds 80 ;;
    *) echo "unknown part $part" >&2 ;;
    esac
done
