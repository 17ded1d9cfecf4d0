"""All models of the gallery, and those whose packages the other tests install, too."""

from gallery import decoders, others, vision  # noqa: F401  (each adds its models)
from gallery.gallery import CASES as CASES

SMALL = [case for case in CASES if case.name in ("Equinox attention", "Flax attention")]
