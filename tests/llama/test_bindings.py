"""Tests of other versions and forks of llama-cpp-python with stand-ins that record the calls.

The tests do not depend on these packages. All other tests of this folder use the installed version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import llama_cpp._ggml
import llama_cpp.llama_cpp as llama
import pytest

from ngramspec.llama import bindings


class Recorded:
    """A C function with a given number of arguments that records its calls."""

    def __init__(self, arguments: int) -> None:
        self.argtypes = [ctypes.c_float] * arguments
        self.called: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.called.append(arguments)


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that replaces llama.cpp's functions and constants by the given ones."""
    return lambda **names: monkeypatch.setattr(bindings, "llama", SimpleNamespace(**names))


def test_bindings_samplers_support_signatures_with_and_without_size(install: Install) -> None:
    """Some versions require the size of the vocabulary for the penalties, or that of the context for DRY."""
    # The installed functions have a supported signature.
    assert len(llama.llama_sampler_init_penalties.argtypes) in (4, 5)
    assert len(llama.llama_sampler_init_dry.argtypes) in (7, 8)
    breakers = (ctypes.c_char_p * 1)(b"\n")
    for arguments, sized in ((5, (1000,)), (4, ())):
        make = Recorded(arguments)
        install(llama_sampler_init_penalties=make)
        bindings.penalties(1000, 64, 1.1, 0.2, 0.3)
        assert make.called == [(*sized, 64, 1.1, 0.2, 0.3)]
    for arguments, sized in ((7, ()), (8, (64,))):
        make = Recorded(arguments)
        install(llama_sampler_init_dry=make)
        bindings.dry("vocab", 0.8, 1.75, 2, 64, breakers)
        assert make.called == [("vocab", *sized, 0.8, 1.75, 2, 64, breakers, 1)]


def test_bindings_ggml_returns_library_that_llama_cpp_loaded(install: Install) -> None:
    count = llama_cpp._ggml.libggml.ggml_backend_dev_count
    assert bindings.ggml().ggml_backend_dev_count() == count() > 0
    # On Windows, libllama finds no functions of other libraries; some forks do not expose the library at all.
    for names in ({"_lib": SimpleNamespace()}, {}):
        install(**names)
        assert bindings.ggml() is llama_cpp._ggml.libggml


@pytest.mark.parametrize("mapped", [True, False])
def test_bindings_set_mapped_supports_load_mode_and_use_mmap(mapped: bool, install: Install) -> None:
    class New(ctypes.Structure):
        _fields_ = (("load_mode", ctypes.c_int),)

    class Old(ctypes.Structure):
        _fields_ = (("use_mmap", ctypes.c_bool),)

    modes, old = {"LLAMA_LOAD_MODE_NONE": 0, "LLAMA_LOAD_MODE_AUTO": -1}, Old(use_mmap=not mapped)
    for names in (modes, {"llama_load_mode": IntEnum("llama_load_mode", modes)}):
        new = New(load_mode=3)
        install(**names)
        bindings.set_mapped(new, mapped)
        assert new.load_mode == (-1 if mapped else 0)
    bindings.set_mapped(old, mapped)
    assert old.use_mmap == mapped


def test_bindings_handle_functions_that_forks_lack_or_rename(install: Install) -> None:
    install(ggml_log_callback="theirs", llama_model_n_embd=lambda _: 7)
    assert bindings.width_out(None) == 7
    assert (bindings.find_suppress_tokens(None), bindings.log_callback()) == ((), "theirs")
    install(llama_log_callback="ours", ggml_log_callback="theirs")
    assert bindings.log_callback() == "ours"


@pytest.mark.parametrize(("devices", "loaded"), [(0, [b"/somewhere/lib"]), (1, [])])
def test_init_backend_without_devices_loads_kernels_from_library_folder(
    devices: int, loaded: list[bytes], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Recorded(1)
    library = SimpleNamespace(
        _name="/somewhere/lib/libggml.so", ggml_backend_dev_count=lambda: devices, ggml_backend_load_all_from_path=load
    )
    monkeypatch.setattr(llama_cpp._ggml, "libggml", library)
    install(llama_backend_init=lambda: None, llama_log_set=lambda *_: None)
    bindings.init_backend()
    assert [folder for (folder,) in load.called] == loaded
