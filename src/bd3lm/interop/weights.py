"""Reading and writing weights: shapes are checked before a tensor is read, and only whole files appear.

A network is built without storage and then given its weights, so loading draws no random numbers and holds
one copy of each tensor.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bd3lm.io.files import local_path, replacing
from bd3lm.io.tensors import Later, file_pieces, in_file_order
from bd3lm.methods import LanguageModelConfig
from bd3lm.models import Network, NetworkConfig
from bd3lm.models.devices import require_room

Shape = tuple[int, ...]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # types that torch computes in
_SAFETENSORS_TYPES = dict(zip(("F16", "BF16", "F32", "F64"), _DTYPES, strict=True))
_ALLOWED = "allowed are float16, bfloat16, float32 and float64"
_LISTED = 5  # how many tensors of each sort an error names
_MOST_HEADER = 2**24  # bytes; a hundred thousand tensors need about 13 million


def parameter_shapes(config: NetworkConfig) -> dict[str, Shape]:
    """The parameters that a network stores: a tied matrix once, by the embedding's name."""
    return {name: tuple(parameter.shape) for name, parameter in skeleton(config).named_parameters()}


def beside_names(config: NetworkConfig) -> frozenset[str]:
    """The parameters that a network learns next to frozen weights."""
    return skeleton(config).may_lack


class Stored(NamedTuple):
    """A tensor according to a file's header."""

    shape: Shape
    dtype: torch.dtype | str
    """A type that torch computes in, or the file's name for another type."""


def read_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes in a safetensors file."""
    return {name: stored.shape for name, stored in read_header(path).items()}


def read_header(path: Path) -> dict[str, Stored]:
    """The contents of a safetensors file from its header, which must have a sane length."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(
                f"{path} must be a readable safetensors file: its header must have at most {_MOST_HEADER:,} "
                f"bytes, got {length:,}"
            )
        # Nothing is read here. With framework="pt" the library would map the file into this process's own
        # memory, which counts against its limits.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: Stored(tuple(each.get_shape()), _type(each)) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} must be a readable safetensors file: {error}") from error


def _type(part: Any) -> torch.dtype | str:
    named = str(part.get_dtype())
    return _SAFETENSORS_TYPES.get(named, named)


def read_tensors(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Some tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


class RowReader:
    """Reads rows of the tensors in a safetensors file, and nothing else of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        self._begins = {name: 8 + length + entries[name]["data_offsets"][0] for name in self.header}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop − 1 of a tensor; a scalar counts as one row."""
        shape, dtype = self.header[name]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"{name} in {self.path} must have a floating-point type, got {dtype}; {_ALLOWED}"
            )
        found = torch.empty((stop - start, *shape[1:]) if shape else (), dtype=dtype)
        room = memoryview(found.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        with self.path.open("rb") as file:
            file.seek(self._begins[name] + start * math.prod(shape[1:]) * dtype.itemsize)
            if file.readinto(room) != len(room):
                raise ValueError(f"{self.path} must hold all of {name}, but ends within it")
        return found


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], *, where: str) -> None:
    """Refuse weights that do not match the config, naming missing, unexpected or mis-shaped ones."""
    shared = [name for name in expected if name in found]
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "wrong shape": [
            f"{name} is {found[name]} but must be {expected[name]}"
            for name in shared
            if found[name] != expected[name]
        ],
    }
    told = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    if told:
        raise ValueError(f"weights in {where} must match its config; {'; '.join(told)}")


def check_layers(found: Mapping[str, Shape], config: NetworkConfig, *, where: str) -> None:
    """Refuse a config with more layers than there are tensors. This must happen before the network is built,
    which could take forever; `check_shapes` names all other mismatches."""
    if config.depth > len(found):
        raise ValueError(
            f"weights in {where} must match its config: it has {config.depth} layers, got {len(found)} "
            "tensors in all"
        )


def check_config(network: Network, config: LanguageModelConfig) -> None:
    """Refuse a config that is not the network's own."""
    if network.config != config.network:
        raise ValueError(f"config.network must be the network's {network.config}, got {config.network}")


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point type, or the type of that name; None stays None."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _DTYPES:
        raise ValueError(f"dtype must be a floating-point type or None, got {dtype!r}; {_ALLOWED}")
    return found


def build(
    config: NetworkConfig,
    state: Mapping[str, Tensor],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    where: str,
) -> Network:
    """A network in evaluation mode with these weights, after `check_shapes` has accepted them.

    Without a dtype the weights keep the one they are stored in.
    """
    one_dtype([tensor.dtype for tensor in state.values()], dtype, where=where)
    # A copy: a tensor from a file reader may be a view of the file, which others may overwrite.
    weights = {name: tensor.to(device=device, dtype=dtype, copy=True) for name, tensor in state.items()}
    return _with_weights(skeleton(config), weights)


def one_dtype(stored: Iterable[torch.dtype | str], dtype: torch.dtype | None, *, where: str) -> torch.dtype:
    """The dtype for the weights: the requested one, or the one that all are stored in."""
    found = set(stored)
    known = [each for each in found if isinstance(each, torch.dtype) and each in _DTYPES]
    if len(known) < len(found) or (dtype is None and len(found) > 1):
        raise ValueError(
            f"weights in {where} must have one floating-point type (or several, if dtype= chooses one), "
            f"got {', '.join(sorted(map(str, found)))}; {_ALLOWED}"
        )
    return known[0] if dtype is None else dtype


def allocate(config: NetworkConfig, *, device: torch.device | str, dtype: torch.dtype, where: str) -> Network:
    """A network in evaluation mode with memory for its weights, which are still to be written."""
    network = skeleton(config)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    least = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    require_room(least, torch.device(device), what=f"the weights in {where}")
    weights = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    return _with_weights(network, weights)


def _with_weights(network: Network, weights: dict[str, Tensor]) -> Network:
    """The network with these tensors as its parameters, in evaluation mode."""
    if next(network.buffers(), None) is not None:  # buffers are not stored, and have no values in a skeleton
        device = next(iter(weights.values())).device
        with torch.random.fork_rng(devices=[]):
            network = network.config.build().to(device)
        buffers = {name for name, _ in network.named_buffers()}
        weights |= {name: each for name, each in network.state_dict().items() if name in buffers}
    shared = _shared(network)
    weights |= {name: weights[first] for name, first in shared.items()}
    network.load_state_dict(weights, assign=True)
    for name, first in shared.items():  # the assignment split one parameter into two
        module, _, own_name = name.rpartition(".")
        setattr(network.get_submodule(module), own_name, network.get_parameter(first))
    return network.eval()


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Later]) -> None:
    """Write a safetensors file that appears only when it is complete. One tensor at a time is in memory."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for piece in file_pieces(tensors, in_file_order(tensors)):
            file.write(piece)


def make_folder(folder: str | Path) -> Path:
    """The folder to save in, created if it does not exist."""
    path = local_path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must be a folder to save in, got the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    return path


def skeleton(config: NetworkConfig) -> Network:
    """A network without storage, on torch's device "meta"."""
    with torch.device("meta"), _NotInitialised():
        return config.build()


def _shared(network: Network) -> dict[str, str]:
    """Parameters that share a tensor with another, such as a tied head, with the name under which each is
    stored."""
    stored = {id(parameter): name for name, parameter in network.named_parameters()}
    every = network.named_parameters(remove_duplicate=False)
    return {name: stored[id(each)] for name, each in every if stored[id(each)] != name}


class _NotInitialised(TorchFunctionMode):
    """Skips the initialization of weights that a module would do.

    Without storage there is nothing to initialize, and torch would import its compiler to do so, which takes
    two seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(f"{name:.200}" for name in names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
