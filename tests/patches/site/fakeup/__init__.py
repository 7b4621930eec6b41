"""An upstream package small enough to be patched in every way that the real ones need."""
