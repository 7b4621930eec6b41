"""FlashInfer's server: what every backend is measured by, and prefill on both sides of 512 tokens.

Up to there its own kernel prefills, above a kernel of ours, which is slower.
"""

import sys

from harness import main

from sgl_det.bench.workloads import Workload

CASES = {
    "prefill_128x512": Workload(many=128, prompt=512, new=1, about_s=1.8),
    "prefill_128x513": Workload(many=128, prompt=513, new=1, about_s=1.8),
    "prefill_32x4096": Workload(many=32, prompt=4096, new=1, about_s=4.0),
}

if __name__ == "__main__":
    sys.exit(main("flashinfer", CASES))
