"""A device that is not there: which tensors would lie on it is followed through every operation,
and mixing them is an error.

PyTorch computes on the CPU all the while. ``meta``, a name that needs no driver, stands for the
device: what is made or moved there is marked, so is all that is computed from it, and an operation
over marked and unmarked tensors raises where CUDA would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, CPU = torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
TAKES_INDICES_OF_THE_CPU = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """A device to make learners on, as long as the context lasts. Give batches to it with
    ``.to(device)``.
    """
    marks = _Marks()
    with _Operations(marks), _Calls(marks):
        yield DEVICE


class _Marks:
    """Which memory lies on the device."""

    def __init__(self) -> None:
        self._storages: dict[
            int, torch.UntypedStorage
        ] = {}  # kept alive, so that no address is used twice

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


class _Operations(TorchDispatchMode):
    """What is computed, and where: backward, too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To wrap it for the compiler would import the compiler: 1.5 s in each worker."""
        return False

    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None:  # it makes something new, or moves
            kwargs["device"] = CPU
            found = func(*args, **kwargs)
            return self._marks.add(found) if device == DEVICE else found
        marked = any(tensor in self._marks for tensor in _tensors((args, kwargs)))
        if marked and func not in COPIES:
            self._refuse_a_mixture(func, [*args, *kwargs.values()])
        found = func(*args, **kwargs)
        if marked and func not in COPIES:
            for tensor in _tensors(found):
                self._marks.add(tensor)
        return found

    def _refuse_a_mixture(self, func: Any, args: list[Any]) -> None:
        """A single number may come from the CPU, but not as one of several to be put together."""
        if func in TAKES_INDICES_OF_THE_CPU:
            del args[1]
        for arg in args:
            for tensor in _tensors(arg):
                if tensor not in self._marks and (tensor.dim() or not isinstance(arg, Tensor)):
                    raise RuntimeError(
                        f"{func}: expected all tensors on one device, and {tensor} is on the CPU"
                    )


class _Calls(TorchFunctionMode):
    """What never becomes an operation on a tensor of the CPU, but would on one of another
    device.
    """

    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        on_device = bool(args) and isinstance(args[0], Tensor) and args[0] in self._marks
        if on_device and func == Tensor.device.__get__:  # bound anew at each access
            return DEVICE
        if on_device and func is Tensor.cpu:
            return _copy(args[0])
        if (
            on_device and func is functional.one_hot
        ):  # it begins with zeros where its argument truly is
            return self._marks.add(func(_copy(args[0]), *args[1:], **kwargs))
        if on_device and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError("a tensor of a device is no array: use .cpu() first")
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            return self._marks.add(func(*args, **{**kwargs, "device": CPU}).clone())
        return func(*args, **kwargs)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU."""
    return torch.empty_like(tensor, device=CPU).copy_(tensor.detach())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
