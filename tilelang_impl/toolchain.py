"""What this port needs of the machine besides Python: a TileLang it is known to work with, and nvcc."""

from __future__ import annotations

import shutil

import tilelang
from tilelang.contrib.nvcc import get_nvcc_compiler

from common import Unsupported

VERSION = "0.1.13"


def version_fault() -> str | None:
    """Why the installed TileLang will not do, None when it does.

    0.1.14 and 0.1.15 crash ("Downcast … to ir.IntImm") on a pipeline of several stages whose length is known at run
    time only, where its copies are cp.async: every kernel of this port on the Ada path. Other versions were not tried.
    """
    found = tilelang.__version__
    if found.partition("+")[0] == VERSION:
        return None
    return (
        f"it is written for TileLang {VERSION}, the installed one is {found} "
        f"(0.1.14 and 0.1.15 crash when they compile these kernels): pip install tilelang=={VERSION}"
    )


def nvcc() -> str:
    """The path of the nvcc that TileLang calls.

    It looks under CUDA_HOME or CUDA_PATH, on PATH, in the package nvidia-cuda-nvcc, then in /usr/local/cuda, once,
    when it is imported. Raises Unsupported, with what to do, when there is none.
    """
    try:
        path = shutil.which(get_nvcc_compiler())
    except RuntimeError:  # no place to look in
        path = None
    if path is None:
        raise Unsupported(
            "TileLang's kernels are compiled by nvcc, which was found neither under CUDA_HOME, nor on PATH, nor in the "
            "package nvidia-cuda-nvcc: install the CUDA toolkit, or pip install '.[nvcc]'"
        )
    return path
