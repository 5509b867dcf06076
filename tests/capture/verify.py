"""Is what a run holds of its linear, attention and embedding layers what these layers computed?

Outputs and gradients are computed again from the recorded inputs: that proves values, pairing and microbatch at once.
Of shares that are still to be added up, the bias is what is left over, the same for every row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ranktape.storage import Record, Records, Run
from tests.analyze.recomputed import recompute

TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest difference, in parts of the largest value, by the dtype that was computed in."""

Group = Mapping[str, Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What is one call of a layer."""

    iteration: int
    rank: int
    module: str
    mode: str
    microbatch: int
    call: int


def verify_run(run: Run | Records, *, mask: torch.Tensor | None = None, scale: float | None = None) -> Counter[str]:
    """Compute every linear, attention and embedding layer again; how often each kind of tensor was compared.

    The keys are `output`, `grad_input`, `grad_weight` of linear layers (whose `grad_bias` is compared, too), the same
    with `grouped ` before them of experts in one product and with `embedding ` before them of embeddings, and with
    `attention ` before them `output`, `grad_query`, `grad_key`, `grad_value`. An assertion fails for what differs, and
    names it. Shards are compared with what is computed from shards: that holds for tensors seen inside of a layer.

    With `mask`, attention is computed with it; else with a causal one, or none, whichever fits the output. `scale` is
    that of its products, the usual one by default.
    """
    counts: Counter[str] = Counter()
    for layer_type, verify in (("linear", _verify_linear), ("embedding", _verify_embedding)):
        records = run.select(layer_type=layer_type)
        weights, biases = (_Weights(records.select(tensor_name=name)) for name in ("weight", "bias"))
        for calls in _by_microbatch(records).values():
            is_grouped = any("offsets" in group for group in calls.values())
            counts += (_verify_grouped if is_grouped else verify)(calls, weights=weights)
            if layer_type == "linear" and not is_grouped:
                counts += _verify_bias(calls, weights=weights, biases=biases)
    for call, group in _by_call(run.select(layer_type="attention")).items():
        counts += _verify_attention(call, group, mask=mask, scale=scale)
    return counts


def recomputed(run: Run | Records) -> Counter[str]:
    """Compute every product again: how many agree, and why others cannot be compared.

    An assertion fails for one that does not agree, and names it.
    """
    counts: Counter[str] = Counter()
    for one in recompute(run.select() if isinstance(run, Run) else run):
        assert one.agreement is None or one.agreement.is_agreed, one
        counts[one.reason or "agrees"] += 1
    return counts


class _Weights:
    """The weights or biases of a run: of a call, the last one before its output."""

    def __init__(self, records: Records) -> None:
        self._records: defaultdict[tuple[int, str], list[Record]] = defaultdict(list)
        for record in sorted(records, key=lambda one: (one.iteration, one.counter)):
            self._records[record.rank, record.module].append(record)

    def of(self, call: _Call, output: Record) -> Record | None:
        """The one that a call computed with; None where none was recorded."""
        known = [one for one in self._records[call.rank, call.module] if one.iteration <= call.iteration]
        same = [one for one in known if one.iteration == call.iteration]
        same = [one for one in same if one.mode == call.mode] or same
        # In a generation a weight is stored once, with the first iteration that has it.
        earlier = [one for one in known if one.iteration < call.iteration]
        before = [one for one in same if one.counter < output.counter] or earlier
        return before[-1] if before else same[0] if same else None


def _by_call(records: Records) -> dict[_Call, dict[str, Record]]:
    groups: defaultdict[_Call, dict[str, Record]] = defaultdict(dict)
    for record in records:
        names = ("iteration", "rank", "module", "mode", "microbatch", "call")
        call = _Call(**{name: getattr(record, name) for name in names})
        assert record.tensor_name not in groups[call], f"{call} has two tensors {record.tensor_name}"
        groups[call][record.tensor_name] = record
    return groups


def _by_microbatch(records: Records) -> dict[tuple[int, int, str, str, int], dict[_Call, dict[str, Record]]]:
    groups: defaultdict[tuple[int, int, str, str, int], dict[_Call, dict[str, Record]]] = defaultdict(dict)
    for call, group in _by_call(records).items():
        groups[call.iteration, call.rank, call.module, call.mode, call.microbatch][call] = group
    return groups


def _verify_linear(calls: Mapping[_Call, Group], *, weights: _Weights) -> Counter[str]:
    counts: Counter[str] = Counter()
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for call, group in calls.items():
        if "input" not in group or "output" not in group:
            continue
        record = weights.of(call, group["output"])
        assert record is not None, f"{call} has no weight"
        output = group["output"].tensor()
        inputs = group["input"].tensor().to(output.dtype)
        weight = record.tensor().to(output.dtype)
        weight = weight.T if record.layout == "IO" else weight
        if "grad_output" not in group:
            continue
        grad = group["grad_output"].tensor()
        if "grad_input" in group:
            again = grad.to(output.dtype) @ weight
            _check_close(group["grad_input"].tensor(), again, what=f"grad_input of {call}")
            counts["grad_input"] += 1
        product = _rows(grad.to(output.dtype)).T @ _rows(inputs)
        expected.append(product.T if record.layout == "IO" else product)
        if "grad_weight" in group:
            found.append(group["grad_weight"].tensor())
    if found and len(found) == len(expected):
        for one, other in zip(found, expected, strict=True):
            _check_close(one, other, what=f"grad_weight of {next(iter(calls))}")
    elif found:
        # The gradient of a leaf comes once for all calls of one graph: it is their sum.
        total = torch.stack([one.float() for one in expected]).sum(0)
        _check_close(torch.stack(found).float().sum(0), total.to(expected[0].dtype), what=f"grad_weight of {call}")
    counts["grad_weight"] += len(found)
    return counts


def _verify_bias(calls: Mapping[_Call, Group], *, weights: _Weights, biases: _Weights) -> Counter[str]:
    """Outputs with their bias, and the gradients of biases."""
    counts: Counter[str] = Counter()
    grads: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for call, group in calls.items():
        if "input" not in group or "output" not in group:
            continue
        record, bias = weights.of(call, group["output"]), biases.of(call, group["output"])
        assert record is not None, f"{call} has no weight"
        output = group["output"].tensor()
        weight = record.tensor().to(output.dtype)
        product = F.linear(group["input"].tensor().to(output.dtype), weight.T if record.layout == "IO" else weight)
        is_without = (group["output"].metadata or {}).get("without_bias")
        if is_partial(group["output"]):
            left = _rows(output) - _rows(product)
            product = product + (left[:1] if len(left) else left)
        elif bias is not None and not (is_without or (bias.metadata or {}).get("returned")):
            product = product + bias.tensor().to(output.dtype)
        _check_close(output, product, what=f"output of {call}")
        counts["output"] += 1
        if "grad_output" in group and not is_without:
            grads.append(_rows(group["grad_output"].tensor()))
        if "grad_bias" in group:
            found.append(group["grad_bias"].tensor())
    if found:
        # Of one that is seen on the bias itself, the sum over all calls comes once.
        rows = torch.cat(grads)
        expected, scale = rows.double().sum(0).to(rows.dtype), rows.double().abs().sum(0)
        _check_close(torch.stack(found).sum(0), expected, scale=scale, what=f"grad_bias of {call}")
    return counts


def is_partial(record: Record) -> bool:
    """Whether it is a share of a sum."""
    return record.placement is not None and any("partial" in str(word) for word in record.placement["placements"])


def _verify_grouped(calls: Mapping[_Call, Group], *, weights: _Weights) -> Counter[str]:
    """Of each expert the product of its own tokens: the rows up to its offset."""
    counts: Counter[str] = Counter()
    for call, group in calls.items():
        record = weights.of(call, group["output"])
        assert record is not None, f"{call} has no weight"
        assert record.layout == "EIO", record
        tensors = {name: one.tensor() for name, one in group.items()}
        ends = tensors["offsets"].tolist()
        assert ends[-1] == len(tensors["input"]), f"{call} leaves out tokens"
        names = [name for name in ("output", "grad_input", "grad_weight") if name in tensors]
        for expert, weight in enumerate(record.tensor()):
            rows = slice(ends[expert - 1] if expert else 0, ends[expert])
            grad = tensors["grad_output"][rows]
            again = {
                "output": tensors["input"][rows] @ weight,
                "grad_input": grad @ weight.T,
                "grad_weight": tensors["input"][rows].T @ grad,
            }
            for name in names:
                found = tensors[name][expert] if name == "grad_weight" else tensors[name][rows]
                _check_close(found, again[name], scale=tensors[name], what=f"{name} of expert {expert} of {call}")
        counts.update(f"grouped {name}" for name in names)
    return counts


def _verify_embedding(calls: Mapping[_Call, Group], *, weights: _Weights) -> Counter[str]:
    counts: Counter[str] = Counter()
    for call, group in calls.items():
        record = weights.of(call, group["output"]) if {"input", "output"} <= set(group) else None
        if record is None:
            continue
        weight = record.tensor()
        output = group["output"].tensor()
        _check_close(output, F.embedding(group["input"].tensor(), weight).to(output.dtype), what=f"output of {call}")
        counts["embedding output"] += 1
        if "grad_output" in group and "grad_weight" in group and len(calls) == 1:
            total = torch.zeros_like(weight)
            total.index_add_(0, group["input"].tensor().flatten(), _rows(group["grad_output"].tensor()).to(weight))
            _check_close(group["grad_weight"].tensor(), total, what=f"grad_weight of {call}")
            counts["embedding grad_weight"] += 1
    return counts


def _verify_attention(call: _Call, group: Group, *, mask: torch.Tensor | None, scale: float | None) -> Counter[str]:
    counts: Counter[str] = Counter()
    names = ("query", "key", "value")
    if not {*names, "output"} <= set(group):
        return counts
    output = group["output"].tensor()
    inputs = [_heads_second(group[name]).to(output.dtype).detach().requires_grad_() for name in names]
    query, key, value = inputs

    def attend(*, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )

    again = attend(is_causal=mask is None)
    seen = _heads_second(group["output"], like=again)
    if mask is None and not _is_close(seen, again):
        again = attend(is_causal=False)
    _check_close(seen, again, what=f"output of {call}")
    counts["attention output"] += 1
    if "grad_output" not in group:
        return counts
    grad_output = _heads_second(group["grad_output"], like=again)
    grads = torch.autograd.grad(again, inputs, grad_output.to(again.dtype))
    for name, grad in zip(names, grads, strict=True):
        if f"grad_{name}" in group:
            _check_close(_heads_second(group[f"grad_{name}"]), grad, what=f"grad_{name} of {call}")
            counts[f"attention grad_{name}"] += 1
    return counts


def _heads_second(record: Record, *, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor as [batch, heads, tokens, head]; an output whose heads are joined is shaped as `like`."""
    tensor, layout = record.tensor(), record.layout
    if not layout and tensor.ndim == 3:
        tensor, layout = tensor.unsqueeze(1), "BHTD"
    if len(layout) == 3 and like is not None:
        tensor = tensor.unflatten(-1, (like.shape[1], like.shape[3]))
        layout = layout[:2] + "HD"
    assert sorted(layout) == sorted("BHTD"), f"{record.module} {record.tensor_name} has layout {layout!r}"
    return tensor.permute([layout.index(letter) for letter in "BHTD"])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _is_close(found: torch.Tensor, expected: torch.Tensor, *, scale: torch.Tensor | None = None) -> bool:
    if found.shape != expected.shape:
        return False
    if not found.numel():
        return True
    largest = (expected if scale is None else scale).abs().max().double()
    coarser = max(TOLERANCES[found.dtype], TOLERANCES[expected.dtype])
    return bool((found.double() - expected.double()).abs().max() <= coarser * largest + 1e-9)


def _check_close(found: torch.Tensor, expected: torch.Tensor, *, what: str, scale: torch.Tensor | None = None) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} and not {tuple(expected.shape)}"
    if not _is_close(found, expected, scale=scale):
        difference = (found.double() - expected.double()).abs().max()
        raise AssertionError(f"{what}: differs by {difference:g}, and is at most {expected.abs().max():g}")
