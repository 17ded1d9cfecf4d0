"""All models of the gallery, and those whose packages the other tests install, too."""

from gallery import decoders, others, vision

CASES = [*decoders.CASES, *vision.CASES, *others.CASES]
SMALL = [case for case in CASES if case.name in ("Equinox attention", "Flax attention")]
