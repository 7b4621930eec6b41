"""Made-up models that are real checkpoints: a config and a seed give a Hugging Face folder.

``make_model`` writes one; ``resolve_model`` finds a named one in the user's cache. Nothing is ever
downloaded. SGLang, transformers and a trainer load the same files.
"""

from sgl_det.make_model.cache import resolve_model
from sgl_det.make_model.shapes import SHAPES
from sgl_det.make_model.writer import make_model

__all__ = ["SHAPES", "make_model", "resolve_model"]
