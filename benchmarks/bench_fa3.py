"""FA3's server: what every backend is measured by, and few requests of some thousand tokens.

In those most of the GPU is idle under FA3's own kernel, and a kernel of ours takes its place.
"""

import sys

from harness import main

from sgl_det.bench.workloads import CACHED, Workload

CASES = {
    "decode_bs1_8k": Workload(many=1, prompt=8192, new=256, kind=CACHED, about_s=2.0),
    "decode_bs4_8k": Workload(many=4, prompt=8192, new=256, kind=CACHED, about_s=3.0),
    "decode_bs16_8k": Workload(many=16, prompt=8192, new=256, kind=CACHED, about_s=6.0),
}

if __name__ == "__main__":
    sys.exit(main("fa3", CASES))
