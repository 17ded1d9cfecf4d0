"""The dtypes of the safetensors format; and the library that reads it, which is an extra."""

from typing import Any

DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F4": "float4_e2m1fn",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def imported(file: str) -> Any:
    """The library, with its NumPy functions; an ``ImportError`` says how to install it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        text = f"safetensors is not installed, which {file} needs: pip install safetensors"
        raise ImportError(text) from error
    return safetensors
