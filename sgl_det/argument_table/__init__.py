"""The verdict on every server argument of SGLang, grouped as SGLang groups them."""

from __future__ import annotations

from sgl_det.argument_table.caches import CACHES
from sgl_det.argument_table.kernels import KERNELS
from sgl_det.argument_table.modalities import MODALITIES
from sgl_det.argument_table.models import MODELS
from sgl_det.argument_table.observability import OBSERVABILITY
from sgl_det.argument_table.parallel import PARALLEL
from sgl_det.argument_table.schedule import SCHEDULE
from sgl_det.argument_table.serving import SERVING
from sgl_det.argument_table.sparse import SPARSE
from sgl_det.argument_table.speculative import SPECULATIVE
from sgl_det.arguments import assemble

TABLE = assemble(
    MODELS,
    SERVING,
    OBSERVABILITY,
    SCHEDULE,
    CACHES,
    KERNELS,
    PARALLEL,
    SPECULATIVE,
    SPARSE,
    MODALITIES,
)
