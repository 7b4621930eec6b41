"""In every process of a server started with this folder on PYTHONPATH: the GPU waits now and then.

Before and after some forward passes its stream sleeps for up to a millisecond, so that what the
host does meanwhile meets the kernels at other moments.

With SGL_DET_TEST_RACE=1 there is a race for them to find: a moment after a pass begins, its tokens
are overwritten on a stream that does not wait for the one that reads them.
"""

import os
import random

from after_import import after_import

MOST_CYCLES, MOMENT_CYCLES = 2_000_000, 100_000
CHANCE = random.Random(os.getpid())
RACE = os.environ.get("SGL_DET_TEST_RACE") == "1"


def delayed(forward):
    import torch

    def wait():
        if CHANCE.random() < 0.5:
            torch.cuda._sleep(CHANCE.randrange(MOST_CYCLES))

    def overwrite(ids):
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(MOMENT_CYCLES)
            ids.bitwise_xor_(1)
        ids.record_stream(other)

    def with_delays(self, forward_batch, *args, **kwargs):
        if RACE:
            overwrite(forward_batch.input_ids)
        wait()
        out = forward(self, forward_batch, *args, **kwargs)
        wait()
        return out

    return with_delays


def delay(module):
    module.ModelRunner.forward = delayed(module.ModelRunner.forward)
    print("delays: the forward pass waits", flush=True)


after_import("sglang.srt.model_executor.model_runner", delay)
