"""Changes a module of a server's processes once it has been imported, from a `sitecustomize.py`."""

import importlib.abc
import importlib.util
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(name, change):
    """Call change(module) when the module of this name has been loaded."""
    sys.meta_path.insert(0, _Finder(name, change))
