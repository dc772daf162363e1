"""The torch dtypes that a shard can hold, and their names in safetensors."""

from __future__ import annotations

import torch

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
# Dtypes that safetensors does not have, or that its torch loader does not read. A shard stores them
# as U8 with one more dimension, the bytes of an element, and their torch name in the metadata.
_AS_BYTES = ("complex32", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2")

# Older releases of torch do not have all of these dtypes.
CODE_OF = {getattr(torch, name): code for name, code in _CODES.items() if hasattr(torch, name)}
DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
BYTES_DTYPES = {name: getattr(torch, name) for name in _AS_BYTES if hasattr(torch, name)}
BYTES_NAMES = {dtype: name for name, dtype in BYTES_DTYPES.items()}
STORED = frozenset(CODE_OF) | frozenset(BYTES_NAMES)
