"""Stand-in for torchvision, of which no published build fits the CPU build of torch that the server pins.

SGLang imports it for image models whatever it serves. Every submodule and every name imports; using one raises.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

__version__ = "0.0.0"


class _NameAsValue(type):
    """Class attributes read as their own name: image processors keep such constants in tables at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(ModuleType):
    """A module in which a capitalised name is a class and any other one is again such a module."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _NameAsValue(name, (), {}) if name[0].isupper() else _module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is a stand-in: this server has no image support")


class _Importer(MetaPathFinder, Loader):
    """Answers for every `torchvision.*`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        ours = fullname.startswith(f"{__name__}.")
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def _module(name: str) -> _Anything:
    module = _Anything(name)
    # transformers asks a module for its file and its specification before it uses it.
    module.__path__ = []
    module.__file__ = __file__
    module.__spec__ = ModuleSpec(name, _IMPORTER, is_package=True)
    return module


_IMPORTER = _Importer()
sys.meta_path.append(_IMPORTER)


def __getattr__(name: str) -> object:
    return getattr(_module(__name__), name)
