"""The path of a captured tensor inside its iteration, and the tensor at a path.

A site's fields are percent-encoded and joined by commas, which encoding never leaves in a field:

    layers.0.attention.query,linear,L0,forward,pre,linear,bf16,input,m0,c0

and one more, `,eval`, of a pass that is no training pass; so that any string a user or a model may hold becomes one
name that a file system, an object store and Zarr accept, that cannot leave its folder, and that gives the string back.
Of a name that is longer than they all accept a hash takes the place of the end; the record has the whole.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ranktape.errors import RunFormatError
from ranktape.storage.format.record_info import Mode

if TYPE_CHECKING:
    from ranktape.storage.format.record_info import RecordInfo

MAX_PATH_LENGTH = 400
"""Characters in a site's path: object stores end keys at 1,024 bytes, and the run's own prefix comes first."""

_HASH_LENGTH = 32

_SHORTENED = "+"
"""Before the hash. Encoding leaves none in a field: no name that is whole looks like one that is not."""

_SEGMENT_LENGTH = 200
"""Characters in one segment of a path: file systems end names at 255 bytes."""

_CONTINUED = "+/"
"""Between two segments of a long path. Encoding leaves no `+` in a field: what one of them ends is no whole name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What tells one captured tensor from all others of its rank and iteration."""

    module: str
    """Dotted path of the module; empty outside of a module."""
    layer_type: str
    """`attention`, `linear`, or the user's own."""
    layer_idx: int
    """Global index of the layer; -1 outside of the stack."""
    operation: str
    """`forward` or `backward`."""
    phase: str
    """`pre`, `post`, `unknown`, or the user's own."""
    component: str
    """`FA`, `linear`, `unknown`, or the user's own."""
    quant_type: str
    """What the run computed in, as tagged."""
    tensor_name: str
    """`query`, `input`, `grad_output`, or the user's own."""
    microbatch: int
    """Index of the forward and backward pass within the step."""
    call: int
    """How many times the site had fired before within the microbatch."""
    mode: str = Mode.TRAIN.value
    """`train` or `eval`."""

    @classmethod
    def of(cls, info: RecordInfo) -> Site:
        """The site of a record."""
        return cls(
            module=info.module,
            layer_type=info.layer_type,
            layer_idx=info.layer_idx,
            operation=info.operation,
            phase=info.phase,
            component=info.component,
            quant_type=info.quant_type,
            tensor_name=info.tensor_name,
            microbatch=info.microbatch,
            call=info.call,
            mode=info.mode,
        )


def site_path(site: Site) -> str:
    """The path of a site below its iteration's group; `parse_site_path` gives it back where it is not shortened.

    Segments are joined by slashes where a name is longer than file systems allow.
    """
    words = (site.operation, site.phase, site.component, site.quant_type, site.tensor_name)
    begin = _begin_name(site.module, site.layer_type, site.layer_idx, *words)
    # Training is what is left out.
    end = "" if site.mode == Mode.TRAIN else f",{site.mode}"
    name = f"{begin},m{site.microbatch},c{site.call}{end}"
    if len(name) > MAX_PATH_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
        name = f"{name[: MAX_PATH_LENGTH - _HASH_LENGTH - 1]}{_SHORTENED}{digest}"
    return _CONTINUED.join(name[start : start + _SEGMENT_LENGTH] for start in range(0, len(name), _SEGMENT_LENGTH))


def parse_site_path(path: str) -> Site:
    """The site at a path that `site_path` wrote.

    Raises:
        RunFormatError: the path is not one of a site, or it was shortened.
    """
    name = path.replace(_CONTINUED, "")
    if _SHORTENED in name:
        raise RunFormatError(f"{path!r} is a name that was shortened: its record has the whole")
    fields = [_decode(field) for field in name.split(",")]
    try:
        module, layer_type, layer, operation, phase, component, quant_type, tensor_name, microbatch, call, *rest = (
            fields
        )
        if rest not in ([], [Mode.EVAL.value]) or (layer[0], microbatch[0], call[0]) != ("L", "m", "c"):
            raise ValueError(path)
        return Site(
            module=module,
            layer_type=layer_type,
            layer_idx=int(layer[1:]),
            operation=operation,
            phase=phase,
            component=component,
            quant_type=quant_type,
            tensor_name=tensor_name,
            microbatch=int(microbatch[1:]),
            call=int(call[1:]),
            mode=rest[0] if rest else Mode.TRAIN.value,
        )
    except (ValueError, IndexError) as error:
        raise RunFormatError(
            f"{path!r} is not the path of a captured tensor: it needs ten fields, and 'eval' or nothing"
        ) from error


@functools.lru_cache(maxsize=1 << 14)
def _begin_name(module: str, layer_type: str, layer_idx: int, *words: str) -> str:
    """The fields that are the same in every iteration: encoding them takes longer than all else."""
    name = ",".join([_encode(module), _encode(layer_type), f"L{layer_idx}", *map(_encode, words)])
    # Zarr reserves names that begin with two underscores; names that begin with a dot are hidden or special.
    return f"%{ord(name[0]):02X}{name[1:]}" if name[0] in "_." else name


def _encode(text: str) -> str:
    # Lone surrogates reach us in file names and module names; they too must come back.
    return quote(text, safe="", encoding="utf-8", errors="surrogatepass")


def _decode(text: str) -> str:
    return unquote(text, encoding="utf-8", errors="surrogatepass")
