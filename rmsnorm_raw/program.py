"""Programs: constants, prelude and kernel as one string of HIP C, with true line numbers.

Knows: where the kernel texts lie and what each kernel's arguments are. The only reader of kernels_src.
Must not: compile or launch anything.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from pathlib import Path

from .plan import Constants

# The arguments of each kernel in order: a pointer P, a 64-bit q or a 32-bit i integer, a `real` r. The natural
# alignment of this row of values is the layout that CUDA, HIP and the host build take.
SIGNATURES = {
    "rmsnorm_fwd": "PPPPPPP" + "qqqqq" + "rr" + "i",
    "rmsnorm_bwd": "PPPPPPPPPP" + "qqqqqqq" + "r" + "i",
    "dweight_reduce": "PP" + "qqq" + "ii",
}

_DTYPE_NAMES = {None: "NONE", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}


@dataclass(frozen=True)
class Program:
    """One compilable string, and the kernel in it. `key` names it in caches and dumps."""

    kernel: str
    constants: Constants

    @cached_property
    def text(self) -> str:
        parts = [_constants_block(self.constants)]
        for name in ("prelude.h", f"{self.kernel}.hip"):
            parts.append(f'#line 1 "{name}"\n{read_source(name)}')
        parts.append(f'#line 1 "entry"\nENTRY({self.kernel})\n')
        text = "".join(parts)
        _dump(self.kernel, text)
        return text

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    @cached_property
    def arguments_format(self) -> str:
        """The `struct` format of the packed arguments."""
        real = "d" if self.constants.compute == "float64" else "f"
        return "@" + SIGNATURES[self.kernel].replace("r", real)

    def pack_arguments(self, arguments: tuple) -> bytes:
        return struct.pack(self.arguments_format, *arguments)


@lru_cache(maxsize=1024)
def program(kernel: str, constants: Constants) -> Program:
    """The program of a plan; the same object for equal constants, so that its text is made once."""
    return Program(kernel, constants)


@cache
def read_source(name: str) -> str:
    """A text of kernels_src: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels_src", here.parent / "kernels_src"):
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise RuntimeError(f"{name} is missing: there is no kernels_src in {here} or beside it; install rmsnorm_raw again")


def _constants_block(constants: Constants) -> str:
    lines = ["enum Dtype { NONE, F16, BF16, F32, F64 };"]
    for field in fields(constants):
        value = getattr(constants, field.name)
        name = field.name.upper()
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"constexpr int {name} = {value};")
        else:
            lines.append(f"constexpr Dtype {name} = {_DTYPE_NAMES[value]};")
    return '#line 1 "constants"\n' + "\n".join(lines) + "\n"


def _dump(kernel: str, text: str) -> None:
    folder = os.environ.get("RMSNORM_RAW_DUMP")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{kernel}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.hip"
        (Path(folder) / name).write_text(text)
