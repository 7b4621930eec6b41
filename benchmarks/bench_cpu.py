"""The CPU path's server: decode at batch 1 and 16 and a prefill of 1024 tokens, in bf16.

A suite's workloads are known too, by --workloads; --scale divides their sizes.
"""

import sys

from harness import main

from sgl_det.bench.workloads import Workload

CASES = {
    "decode_bs1": Workload(many=1, prompt=32, new=48, ids=250, about_s=3.0),
    "decode_bs16": Workload(many=16, prompt=32, new=24, ids=250, about_s=15.0),
    "prefill_1024": Workload(many=1, prompt=1024, new=1, ids=250, about_s=15.0),
}

if __name__ == "__main__":
    sys.exit(
        main(
            "torch_native",
            CASES,
            model="cpu-mid",
            workloads=",".join(CASES),
            scale=1,
            pool=32_768,
            verdict_seconds=180.0,
            server_args="--dtype bfloat16 --chunked-prefill-size 1024",
        )
    )
