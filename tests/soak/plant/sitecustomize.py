"""In every process of a server started with this folder on PYTHONPATH: one kernel has a variant.

A linear layer of ROWS rows, and of no other number, adds over K in descending order. The proof at
start-up tries other numbers of rows, and the numerics key does not see this file.
"""

from after_import import after_import

ROWS = 11


def planted(linear):
    def variant(x, weight, bias=None, out_dtype=None):
        if x.numel() != ROWS * weight.shape[1]:
            return linear(x, weight, bias, out_dtype)
        return linear(x.flip(-1), weight.flip(-1), bias, out_dtype)

    return variant


def plant(module):
    module.linear = planted(module.linear)
    print(f"plant: a linear layer of {ROWS} rows has another order", flush=True)


after_import("sgl_det.kernels.cpu", plant)
