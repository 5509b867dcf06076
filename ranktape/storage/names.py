"""Which path does a captured tensor have inside its iteration, and which tensor is at a path?

A site's fields are percent-encoded and joined by commas, which encoding never leaves in a field:

    layers.0.attention.query,linear,L0,forward,pre,linear,bf16,input,m0,c0

so that any string a user or a model may hold becomes one name that a file system, an object store and
Zarr accept, that cannot leave its folder, and that gives the string back.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from ranktape.errors import RunFormatError, UsageError

MAX_PATH_LENGTH = 700
"""Characters in a site's path: object stores end keys at 1,024 bytes, and the run's own prefix comes first."""

_SEGMENT_LENGTH = 200
"""Characters in one segment of a path: file systems end names at 255 bytes."""

_CONTINUED = "/+"
"""Between two segments of a long path; encoding leaves no `+` in a field."""


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


def site_path(site: Site) -> str:
    """The path of a site below its iteration's group; `parse_site_path` gives the site back.

    Segments are joined by slashes where a name is longer than file systems allow.

    Raises:
        UsageError: the path would be longer than an object store's keys allow.
    """
    fields = (
        _encode(site.module),
        _encode(site.layer_type),
        f"L{site.layer_idx}",
        _encode(site.operation),
        _encode(site.phase),
        _encode(site.component),
        _encode(site.quant_type),
        _encode(site.tensor_name),
        f"m{site.microbatch}",
        f"c{site.call}",
    )
    name = ",".join(fields)
    # Zarr reserves names that begin with two underscores; names that begin with a dot are hidden or special.
    if name[0] in "_.":
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > MAX_PATH_LENGTH:
        raise UsageError(
            f"the name of module {site.module[:40]!r}... takes {len(name)} characters in the store, "
            f"{MAX_PATH_LENGTH} are allowed: shorten the module path or the tags"
        )
    return _CONTINUED.join(name[start : start + _SEGMENT_LENGTH] for start in range(0, len(name), _SEGMENT_LENGTH))


def parse_site_path(path: str) -> Site:
    """The site at a path that `site_path` wrote.

    Raises:
        RunFormatError: the path is not one of a site.
    """
    fields = [_decode(field) for field in path.replace(_CONTINUED, "").split(",")]
    try:
        module, layer_type, layer, operation, phase, component, quant_type, tensor_name, microbatch, call = fields
        if (layer[0], microbatch[0], call[0]) != ("L", "m", "c"):
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
        )
    except (ValueError, IndexError) as error:
        raise RunFormatError(f"{path!r} is not the path of a captured tensor: it needs ten fields") from error


def _encode(text: str) -> str:
    # Lone surrogates reach us in file names and module names; they too must come back.
    return quote(text, safe="", encoding="utf-8", errors="surrogatepass")


def _decode(text: str) -> str:
    return unquote(text, encoding="utf-8", errors="surrogatepass")
