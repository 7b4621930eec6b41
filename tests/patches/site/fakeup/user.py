"""A module that binds names of another one when it is imported."""

from fakeup.ops import Wrapper, cached, decorated, scale

begin = Wrapper.plan

__all__ = ["begin", "cached", "decorated", "scale"]
