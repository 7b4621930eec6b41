#!/usr/bin/env bash
# The axes of all three backends take longer than one call to a lent machine may:
#   axes_detached.sh start [BACKENDS]   start benchmarks/axes.py in a session of its own
#   axes_detached.sh wait SECONDS       follow it for so long at most, then copy what there is to $OUT
# A start-up refusal ends the wait early, so that it can be looked at while the others go on.
set -u
run=$HOME/axes-run
case "$1" in
start)
    mkdir -p "$run"
    backends=${2:-triton,fa3,flashinfer}
    setsid nohup python3 -W ignore benchmarks/axes.py --model qwen3-8b --backends "$backends" \
        --out "$run/axes.json" --logs "$run" >"$run/run.out" 2>&1 </dev/null &
    sleep 1
    pgrep -f benchmarks/axes.py >"$run/pid"
    ;;
wait)
    end=$((SECONDS + $2))
    while [ $SECONDS -lt $end ] && kill -0 "$(head -1 "$run/pid")" 2>/dev/null; do
        sleep 2
        grep -q "refused:" "$run"/*.log 2>/dev/null && [ ! -e "$run/seen" ] && touch "$run/seen" && break
    done
    cat "$run/run.out"
    grep -h "sgl_det: refused\|numerics key\|Traceback" "$run"/*.log
    kill -0 "$(head -1 "$run/pid")" 2>/dev/null && echo "still running" || echo "ended"
    cp "$run/axes.json" "$OUT/" 2>/dev/null
    tar cJf "$OUT/logs.tar.xz" -C "$run" $(cd "$run" && ls *.log run.out)
    ;;
esac
