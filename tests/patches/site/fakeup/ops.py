"""Functions, methods, and the kinds of binding under which upstreams pass them around."""

import functools


def traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    call.traced = True
    return call


def scale(x):
    return f"scale {x}"


@functools.lru_cache(maxsize=8)
def cached(x):
    return f"cached {x}"


@traced
def decorated(x):
    """Text at column zero, in a function
    that is indented elsewhere."""
    return f"decorated {x}"
    # A comment that trails the body.


def held(x):
    return f"held {x}"


class Wrapper:
    def plan(self, x):
        return f"plan {x}"

    begin_forward = plan

    @staticmethod
    def shift(x):
        return f"shift {x}"

    @classmethod
    def make(cls, x):
        return f"make {cls.__name__} {x}"

    @property
    def size(self):
        return 1

    class Inner:
        def plan(self, x):
            return f"inner {x}"


class Child(Wrapper):
    pass


class Other:
    start = Wrapper.plan


REGISTRY = {"scale": scale, "nested": {"shift": Wrapper.shift}}
STAGES = [held, scale]
make_default = Wrapper.make
