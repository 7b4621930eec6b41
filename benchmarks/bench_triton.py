"""Triton's server: what every backend is measured by, and one request of few splits.

A split has 512 tokens; one request of 512 has a single one, which no second kernel can share.
"""

import sys

from harness import main

from sgl_det.bench.workloads import CACHED, Workload

CASES = {
    "decode_bs1_512": Workload(many=1, prompt=512, new=256, kind=CACHED, about_s=1.6),
    "decode_bs64_2k": Workload(many=64, prompt=2048, new=128, kind=CACHED, about_s=6.0),
}

if __name__ == "__main__":
    sys.exit(main("triton", CASES))
