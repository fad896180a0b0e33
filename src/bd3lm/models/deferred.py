"""A network's first weights, recorded and computed later: each tensor can be made alone, when it is needed.

A network built inside `Recording` has shapes but no values (torch's device "meta"). The recording lists each
operation on its tensors, with the state of torch's generator before each draw. `DeferredWeights` repeats
these operations for one tensor at a time: the same operations on the same numbers, so the same bits as in a
network built whole. Memory never holds more than one tensor and its inputs.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

ReadRows = Callable[[int, int], Tensor]
"""Reads rows first..last − 1 of a tensor."""

# Random draws that use only the shape of a tensor, never its values.
_DRAWS = {
    f"aten::{name}"
    for name in (
        *("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    )
}


_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class CannotDefer(ValueError):
    """The construction of a network does something that cannot be recorded."""


@dataclass(frozen=True)
class _Place:
    """A tensor, as a view of its storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """The distance between its first and last number in the storage, counting both."""
        return 1 + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class _Done:
    """One recorded operation: the storages it writes, makes and reads."""

    run: Callable[[Callable[[_Place], Tensor]], tuple[Tensor, ...]]
    """Runs the operation, given a function that finds tensors. Returns the new tensors."""
    made: tuple[_Place, ...]
    writes: frozenset[int]
    reads: frozenset[int]
    is_fresh: bool
    """Whether it overwrites everything that was there before."""
    rows: ReadRows | None = None
    """Set if the whole tensor is read from a file."""


class _InitIsNotTold(TorchFunctionMode):
    """Hides "meta" from `torch.nn.init`, where some functions skip tensors without storage."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Within this context tensors have no values, and operations on them are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[_Done] = []
        self.room: torch.UntypedStorage | None = None
        self._kept: dict[int, torch.UntypedStorage] = {}  # alive, so no two share an address
        self._meta, self._told = torch.device("meta"), _InitIsNotTold()

    def __enter__(self) -> Self:
        self._meta.__enter__()
        self._told.__enter__()  # entered last: it must be innermost, to see the calls of `is_meta`
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._told.__exit__(*error)
        self._meta.__exit__(*error)
        if error[0] in (RuntimeError, NotImplementedError):  # what torch raises when values are missing
            raise CannotDefer(f"building this network needs values of its weights: {error[1]}") from error[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, shape = tree_flatten((args, kwargs))
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)
        in_place = func._schema.name.endswith("_") and isinstance(args[0], Tensor) and args[0].is_meta
        result = args[0] if in_place else func(*args, **kwargs)
        made = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor) and each.is_meta]
        touched = [each for each in flat if isinstance(each, Tensor) and each.is_meta]
        if not made and touched and not in_place:
            raise CannotDefer(f"{func} needs the values of weights that do not exist yet")
        if made:
            self._write_down(func, flat, shape, [] if in_place else made, args[0] if in_place else None)
        return result

    def give(self, tensor: Tensor, rows: ReadRows) -> None:
        """Take the whole tensor from elsewhere, whatever was done to it before."""
        place = self.place(tensor)

        def run(find: Callable[[_Place], Tensor]) -> tuple[Tensor, ...]:
            find(place).copy_(rows(0, place.size[0] if place.size else 1).view(place.size))
            return ()

        written = frozenset({place.storage})
        self.done.append(_Done(run, (), written, frozenset(), is_fresh=True, rows=rows))

    def place(self, tensor: Tensor) -> _Place:
        """The place of one of the network's tensors."""
        storage = tensor.untyped_storage()
        self._kept.setdefault(storage._cdata, storage)
        return _Place(
            storage._cdata,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def new_storage(self, key: int) -> torch.UntypedStorage:
        """Memory on the CPU for the contents of a storage."""
        return torch.UntypedStorage(self._kept[key].nbytes())

    def _write_down(
        self, func: Any, flat: list[Any], shape: Any, made: list[Tensor], target: Tensor | None
    ) -> None:
        state = self._draw(func, flat, shape)
        noted = [self._noted(each) for each in flat]
        places = tuple(map(self.place, made))

        def run(find: Callable[[_Place], Tensor]) -> tuple[Tensor, ...]:
            args, kwargs = tree_unflatten([find(x) if isinstance(x, _Place) else x for x in noted], shape)
            if state is not None:
                torch.default_generator.set_state(state)
            result = func(*args, **kwargs)
            return () if target is not None else tuple(x for x in tree_flatten(result)[0] if _is_tensor(x))

        given = [each.storage for each in noted if isinstance(each, _Place)]
        if target is None:
            written, read, is_fresh = {each.storage for each in places}, set(given), True
        else:
            written, read = set(given[:1]), set(given)
            known = state is not None or func._schema.name in ("aten::fill_", "aten::zero_", "aten::copy_")
            is_fresh = known and _fills(target)
            if is_fresh:
                read -= written
        self.done.append(_Done(run, places, frozenset(written), frozenset(read), is_fresh))

    def _noted(self, value: Any) -> Any:
        if _is_tensor(value):
            return self.place(value) if value.is_meta else value.clone()
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value

    def _draw(self, func: Any, flat: list[Any], shape: Any) -> Tensor | None:
        """Save the state of torch's generator, then make the draw to advance it."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        if func._schema.name not in _DRAWS or any(isinstance(each, torch.Generator) for each in flat):
            raise CannotDefer(f"{func} draws random numbers in a way that cannot be repeated")
        state = torch.default_generator.get_state()
        noted = [self._noted(each) for each in flat]
        real = [self._scratch(each) if isinstance(each, _Place) else each for each in noted]
        args, kwargs = tree_unflatten(real, shape)
        func(*args, **kwargs)
        return state

    def _scratch(self, place: _Place) -> Tensor:
        """Memory for a draw that is thrown away. All draws share one piece: with many pieces, the saved
        generator states would lie between them, and the system would get no memory back."""
        needed = (place.offset + place.span) * place.dtype.itemsize
        if self.room is None or self.room.nbytes() < needed:
            self.room = None
            self.room = torch.UntypedStorage(needed)
        return torch.empty(0, dtype=place.dtype).set_(self.room, place.offset, place.size, place.stride)


class DeferredWeights:
    """The parameters and buffers, by name, of a network built inside a `Recording`."""

    def __init__(self, network: nn.Module, recording: Recording) -> None:
        """Nothing may be recorded after this."""
        named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        self._recording, recording.room = recording, None
        self._places: Mapping[str, _Place] = {
            name: recording.place(tensor.detach()) for name, tensor in named.items() if tensor.is_meta
        }
        for name in self._places:
            self._check(name)

    def names(self) -> list[str]:
        """The names of all deferred tensors: those that the network does not hold already."""
        return list(self._places)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop − 1 of a tensor; a scalar counts as one row. If the tensor comes from a file, only
        these rows are read."""
        place = self._places[name]
        steps = self._steps(place.storage)
        if len(steps) == 1 and (read := steps[0].rows) is not None:
            return read(start, stop)
        whole = self._made(place, steps)
        return whole[start:stop] if place.size else whole

    def _check(self, name: str) -> None:
        """Refuse a tensor made from others that no operation wrote: their values were lost."""
        known: set[int] = set()
        for each in self._steps(self._places[name].storage):
            if each.reads - each.writes - known:
                raise CannotDefer(f"{name} depends on values that no recorded operation produced")
            known |= each.writes

    def _steps(self, storage: int) -> list[_Done]:
        """The operations that produce the final contents of a storage, in order."""
        wanted, found = {storage}, []
        for each in reversed(self._recording.done):
            if each.writes & wanted:
                found.append(each)
                if each.is_fresh:
                    wanted -= each.writes
                wanted |= each.reads
        return found[::-1]

    def _made(self, place: _Place, steps: list[_Done]) -> Tensor:
        real: dict[int, torch.UntypedStorage] = {}

        def find(place: _Place) -> Tensor:
            if place.storage not in real:
                real[place.storage] = self._recording.new_storage(place.storage)
            empty = torch.empty(0, dtype=place.dtype)
            return empty.set_(real[place.storage], place.offset, place.size, place.stride)

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for each in steps:
                for meant, tensor in zip(each.made, each.run(find), strict=True):
                    real.pop(meant.storage, None)
                    find(meant).copy_(tensor)  # in the layout that later views of it were recorded with
        return find(place)


def _fills(target: Tensor) -> bool:
    """Whether a tensor covers its whole storage."""
    return target.is_contiguous() and target.untyped_storage().nbytes() == target.numel() * target.itemsize


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
