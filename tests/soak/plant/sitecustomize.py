"""In every process of a server started with this folder on PYTHONPATH: one kernel has a variant.

A linear layer of ROWS rows, and of no other number, adds over K in descending order. The proof at
start-up tries other numbers of rows, and the numerics key does not see this file.
"""

import importlib.abc
import importlib.util
import sys

MODULE = "sgl_det.kernels.cpu"
ROWS = 11


def planted(linear):
    def variant(x, weight, bias=None, out_dtype=None):
        if x.numel() != ROWS * weight.shape[1]:
            return linear(x, weight, bias, out_dtype)
        return linear(x.flip(-1), weight.flip(-1), bias, out_dtype)

    return variant


class Finder(importlib.abc.MetaPathFinder):
    """Replaces the kernel once its module is loaded."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.linear = planted(module.linear)
            print(f"plant: a linear layer of {ROWS} rows has another order", flush=True)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
