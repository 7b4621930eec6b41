#!/usr/bin/env bash
# The axes of all three backends take longer than one call to a lent machine may:
#   axes_detached.sh start RUN      start `axes.py --run RUN` in a session of its own
#   axes_detached.sh wait SECONDS   follow it for so long at most, then copy what there is to $OUT
set -u
run=$HOME/axes-run
case "$1" in
start)
    mkdir -p "$run"
    setsid nohup python3 -W ignore benchmarks/axes.py --run "$2" --out "$run" >"$run/run.out" 2>&1 </dev/null &
    sleep 1
    pgrep -f benchmarks/axes.py | head -1 >"$run/pid"
    ;;
wait)
    end=$((SECONDS + $2))
    while [ $SECONDS -lt $end ] && kill -0 "$(cat "$run/pid")" 2>/dev/null; do sleep 2; done
    cat "$run/run.out"
    grep -h "sgl_det: refused\|numerics key" "$run"/*.log
    kill -0 "$(cat "$run/pid")" 2>/dev/null && echo "still running" || echo "ended"
    tar cJf "$OUT/axes-run.tar.xz" -C "$run" .
    ;;
esac
