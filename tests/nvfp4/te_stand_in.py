"""Transformer Engine without its compiled half: enough to trace, lower and compile, nothing that runs.

The package `transformer-engine` is pure Python; what it asks of its extension `transformer_engine_jax` while tracing
is a few enums (recorded in `tests/data/te`) and the device's properties. Custom calls are satisfied by one handler
that is never run.
"""

import contextlib
import ctypes
import enum
import importlib
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import jax

from tests.golden import DATA

EXTENSION = "transformer_engine_jax"
SURFACE = json.loads((DATA / "te" / "extension_surface.json").read_text())


def extension(capability: int) -> types.ModuleType:
    """A module in the extension's place, on a device of the given compute capability (100 = 10.0)."""
    module = types.ModuleType(EXTENSION)
    module.__spec__ = ModuleSpec(EXTENSION, None)
    for name, members in SURFACE["enums"].items():
        setattr(module, name, enum.IntEnum(name, members))
    for name in SURFACE["funcs"]:
        setattr(module, name, _refusal(name))
    workspace = [((1,), module.DType.kByte)]
    answers = {
        "get_device_compute_capability": capability,
        "get_cublasLt_version": 131000,
        "get_cuda_version": 13050,
        "get_cudnn_version": 92801,
        "get_num_compute_streams": 4,
        "get_grouped_gemm_setup_workspace_size": 1024,
        "get_dbias_quantize_workspace_sizes": workspace,
        "is_non_nt_fp8_gemm_supported": True,
        "registrations": {},
    }
    for name, value in answers.items():
        setattr(module, name, lambda *_, value=value: value)
    # Looked up with hasattr: absent in a build without NCCL's expert parallelism.
    for name in ("get_ep_instance_state_type_id", "get_ep_instance_state_type_info"):
        delattr(module, name)
    return module


def _refusal(name: str):
    def refuse(*_, **__):
        raise RuntimeError(f"{EXTENSION}.{name} has no stand-in")

    return refuse


@contextlib.contextmanager
def installed(capability: int = 100, *, pure: bool = False) -> Iterator[types.ModuleType]:
    """The stand-in imported in place of the extension, and everything of Transformer Engine forgotten afterwards.

    `pure` has Transformer Engine replace its custom calls by JAX operations, which run anywhere.
    """
    before = dict(os.environ)
    _forget()
    # Its own switch for documentation builds: do not load cuDNN, cuBLAS and the core library.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_JAX_CUSTOM_CALLS"] = "false" if pure else "true"
    module = sys.modules[EXTENSION] = extension(capability)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            common = importlib.import_module("transformer_engine.common")
            common.load_framework_extension = lambda framework: None
            # The first import of the package drops its JAX half when the core library is absent.
            for name in [name for name in sys.modules if name.startswith("transformer_engine.jax")]:
                del sys.modules[name]
            sys.modules[EXTENSION] = module
            importlib.import_module("transformer_engine.jax")
            yield module
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


def _forget() -> None:
    for name in list(sys.modules):
        if name == EXTENSION or name.partition(".")[0] == "transformer_engine":
            del sys.modules[name]


class _Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension (this and the next two: jaxlib's include/xla/ffi/api/c_api.h)."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handler(frame) -> None:
    """Answer the one question that compiling asks, the version of the interface; success is a null pointer."""
    if frame.contents.extension:
        answer = ctypes.cast(frame.contents.extension.contents.metadata, ctypes.POINTER(_Metadata)).contents
        answer.major, answer.minor = 0, 1


def register_custom_calls() -> None:
    """Let XLA compile programs that call Transformer Engine. Once per process; registration cannot be undone."""
    capsule = jax.ffi.pycapsule(ctypes.cast(_handler, ctypes.c_void_p).value)
    for name in SURFACE["registrations"]:
        jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
