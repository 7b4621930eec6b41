"""In every process of a server started with this folder on PYTHONPATH: the GPU waits now and then.

Before and after some forward passes its stream sleeps for up to a millisecond, so that what the
host does meanwhile meets the kernels at other moments.
"""

import importlib.abc
import importlib.util
import os
import random
import sys

MODULE = "sglang.srt.model_executor.model_runner"
MOST_CYCLES = 2_000_000
CHANCE = random.Random(os.getpid())


def delayed(forward):
    import torch

    def wait():
        if CHANCE.random() < 0.5:
            torch.cuda._sleep(CHANCE.randrange(MOST_CYCLES))

    def with_delays(*args, **kwargs):
        wait()
        out = forward(*args, **kwargs)
        wait()
        return out

    return with_delays


class Finder(importlib.abc.MetaPathFinder):
    """Wraps the forward pass once its module is loaded."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.ModelRunner.forward = delayed(module.ModelRunner.forward)
            print("delays: the forward pass waits", flush=True)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
