"""Shows the errors of the products of linear layers by recipe, replayed from the recorded operands."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.identity import (
    IDENTITY,
    answer_by_source,
    group_columns,
    group_row,
    key_column,
    with_stacks,
    words,
)
from ranktape.analyze.numerics.attention import ATTENTION_PRODUCTS
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.recipes.plan_file import PlannedModule, PrecisionPlan, write_plan
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.numerics.recipes.words import RecipeSource, parse_recipes
from ranktape.analyze.replays.calls import LINEAR, RecordedCalls, select_calls, split_by_sample
from ranktape.analyze.replays.computable import CALL_FIELDS
from ranktape.analyze.replays.precision_plan import precision_plan
from ranktape.analyze.replays.replayed import GROUP_FIELDS, Replayed, ReplayedGroup, replay_selected
from ranktape.analyze.replays.tasks import without_unknown_forms
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError, UnknownFieldError, UsageError, nearest
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.places.failures import printable
from ranktape.storage.query.filters import expect_list
from ranktape.storage.records.records import SOURCE

ERROR_COLUMNS = (
    Column(name="sqnr", kind=Kind.FLOAT, head="SQNR", unit="dB"),
    Column(name="relative_error", kind=Kind.FLOAT, head="relative error"),
    Column(name="cosine", kind=Kind.COSINE),
    Column(name="max_abs_error", kind=Kind.FLOAT, head="largest error"),
    Column(name="bias", kind=Kind.FLOAT),
    Column(name="gain", kind=Kind.FLOAT, is_detail=True),
    Column(name="norm_ratio", kind=Kind.FLOAT, head="norm ratio"),
)
"""Errors against the product of the recorded operands: properties of `ErrorSums`."""

COLUMNS = (
    Column(name="calls", kind=Kind.INTEGER),
    *ERROR_COLUMNS,
    Column(name="median_sqnr", kind=Kind.FLOAT, head="median call", unit="dB", is_detail=True),
    Column(name="worst_sqnr", kind=Kind.FLOAT, head="worst call", unit="dB"),
    Column(name="worst_at", kind=Kind.TEXT, head="at"),
    Column(name="recorded_sqnr", kind=Kind.FLOAT, head="against recorded", unit="dB"),
    Column(name="elements", kind=Kind.INTEGER, is_detail=True),
    Column(name="compared", kind=Kind.INTEGER, is_detail=True),
    Column(name="lost", kind=Kind.INTEGER, is_detail=True),
)
"""The columns of a group of products."""

PLAN_COLUMNS = (
    Column(name="recipe", kind=Kind.TEXT),
    Column(name="bits", kind=Kind.FLOAT),
    Column(name="speed", kind=Kind.FLOAT),
)
"""The columns of a layer in a plan, before those of its products."""

_LOCATION_FIELDS = ("iteration", "rank", "microbatch", "call", "module")
"""The fields that locate the worst call, unless rows are grouped by them."""

_MAX_NAMED = 3
"""Maximum number of modules and reasons that a note names."""

_MIN_MATCHING_SQNR = 6.0
"""SQNR, in dB, below which a recorded result cannot be the product of these operands with any rounding."""


def replay(
    records: Records,
    *,
    recipe: RecipeSource | Sequence[RecipeSource] = ("nvfp4", "mxfp8"),
    product: str | Sequence[str] = (),
    by: Sequence[str] = (),
    attention: bool = False,
    show: Literal["products", "unreplayable"] = "products",
    target_sqnr: str | None = None,
    target_bits: float | None = None,
    plan: Path | None = None,
    engine: Engine | None = None,
) -> Table:
    """Compute the products of linear layers again in each recipe, from the recorded operands, and show their errors.

    Each layer, product and recipe has a row, which combines all calls. Rows of the recipe `recorded` show the error of
    the training's own rounding. With `target_sqnr` or `target_bits`, the result is a precision plan: for each layer,
    the cheapest recipe in which all its products reach the target, or bf16 if there is none. The page "Replay" explains
    the columns.

    Args:
        recipe (NAME): nvfp4, mxfp8, fp8_tensor, nvfp4_nvidia, or a .yaml file of recipes; repeatable.
        product (NAME): output, grad_input, grad_weight; for attention also grad_query, grad_key, grad_value.
        attention: Also replay attention.
        show: Show errors, or products that cannot be computed again.
        target_sqnr (DB): Make a plan in which products reach this SQNR: 18, or output=20,grad_weight=15.
        target_bits (BITS): Make a plan with at most this many bits per element and the best worst product.
        plan (FILE): Write the plan to this file, for --quant-plan.

    Note:
        SQNR, relative error (Frobenius), cosine and the largest error cover the elements that are finite in both the
        product and the same product in float32. The bias is the mean error over its standard error. The norm ratio is
        only given for gradients; the gain is the least-squares factor of the product. Undefined values are missing.

        Filters select products by their results; operands may be outside of the selection. Shards are assembled if a
        product needs values of other ranks. Several sources are replayed separately; a precision plan needs a single
        source.

        If `by` contains `sample`, rows of each sample of `output` and `grad_input` are evaluated separately; operands
        are quantised as in the whole call, whose samples can share a scale. `grad_weight` sums over all samples, and is
        left out. With `attention`, calls whose mask is neither in their metadata nor in their output are left out.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: no record belongs to a linear layer, or no product can be computed again.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names an unknown field of a call.
        UsageError: a recipe or a product is unknown, or options exclude each other.
    """
    if target_sqnr is not None or target_bits is not None or plan is not None:
        options = {"by": by, "product": product, "attention": attention, "show": show != "products"}
        _check_plan_options(target_sqnr, target_bits, options=options)
        planned = precision_plan(
            records, recipe=recipe, target_sqnr=target_sqnr, target_bits=target_bits, engine=engine
        )
        return _written(planned, plan)
    expect_list(by)
    question = _ReplayQuestion(
        recipes=parse_recipes(recipe),
        products=words(product),
        by=by,
        has_attention=attention,
        engine=engine or Engine(),
    )
    return question.answer(records, question.left_out if show == "unreplayable" else question.table)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayQuestion:
    """A question about the products of one source."""

    recipes: Sequence[Recipe]
    products: Sequence[str]
    by: Sequence[str]
    has_attention: bool
    engine: Engine

    def answer(self, records: Records, ask: Callable[[Records], Table]) -> Table:
        """The table of one source, or of several sources together."""
        if len(records.sources) <= 1 and SOURCE not in self.by:
            return ask(records)
        return answer_by_source(records, ask, title=f"products of the layers of {len(records.sources)} sources")

    def left_out(self, records: Records) -> Table:
        """The table of products that cannot be replayed."""
        calls = without_unknown_forms(self._calls(records), engine=self.engine)
        return Table(
            title=f"{len(calls.left_out)} products that cannot be computed again from the records",
            columns=(
                *(key_column(field, is_detail=field in _DETAILS) for field in CALL_FIELDS),
                Column(name="product", kind=Kind.TEXT, is_key=True),
                Column(name="reason", kind=Kind.TEXT),
            ),
            rows=tuple((*one.key, one.product, one.reason) for one in calls.left_out),
        )

    def table(self, records: Records) -> Table:
        """The table of the errors of products."""
        calls, fields = self._calls(records), _fields(records, [name for name in self.by if name != SOURCE])
        _check_calls(calls)
        replayed = replay_selected(calls, self.recipes, engine=self.engine)
        if not replayed.places.size:
            raise NoRecordsError(_none_of(replayed.calls))
        groups = replayed.groups(fields)
        places = [name for name in _LOCATION_FIELDS if name not in fields and len(set(replayed.column(name))) > 1]
        kind = "" if self.has_attention else "linear "
        num_layers = len({call.field("module") or call.field("layer_idx") for call in calls.calls})
        return Table(
            title=f"errors of the products of {len(calls.calls)} calls of {num_layers} {kind}layers by recipe, "
            "relative to the products of the recorded operands in float32",
            columns=(*group_columns(fields)[:-1], *COLUMNS),
            rows=tuple(
                (*group_row({**group.key}, num_records=0)[:-1], *_cells(group, replayed, places)) for group in groups
            ),
            notes=tuple(_notes(replayed, self.recipes, has_bias=any(one.exact.bias is not None for one in groups))),
            worst_first=_worst_first,
        )

    def _calls(self, records: Records) -> RecordedCalls:
        _check_products(self.products, has_attention=self.has_attention)
        calls = select_calls(records, products=self.products, has_attention=self.has_attention)
        return (
            split_by_sample(calls)
            if SAMPLE in _fields(records, [name for name in self.by if name != SOURCE])
            else calls
        )


def _check_products(products: Sequence[str], *, has_attention: bool) -> None:
    known = list(dict.fromkeys((*PRODUCTS, *(ATTENTION_PRODUCTS if has_attention else ()))))
    for name in products:
        if not has_attention and name in ATTENTION_PRODUCTS and name not in PRODUCTS:
            raise UsageError(f"--product {name} is a product of attention: add --attention")
        if name not in known:
            layers = "these layers" if has_attention else "a linear layer"
            raise UsageError(f"--product {name!r:.60} is not a product of {layers}: {nearest(name, known)}")


def _check_plan_options(target_sqnr: str | None, target_bits: float | None, *, options: Mapping[str, Any]) -> None:
    if target_sqnr is None and target_bits is None:
        raise UsageError("--plan needs a target: give --target-sqnr, such as 18, or --target-bits, such as 6")
    if target_sqnr is not None and target_bits is not None:
        raise UsageError("--target-sqnr and --target-bits exclude each other: give one")
    for name in (name for name, value in options.items() if value):
        target = "target-bits" if target_sqnr is None else "target-sqnr"
        raise UsageError(f"--{name} and --{target} exclude each other: a precision plan has one row for each layer")


def _written(planned: PrecisionPlan, path: Path | None) -> Table:
    """The table of a plan, which is written to the file if a path is given."""
    table = _plan_table(planned)
    if path is None:
        return table
    write_plan(planned, path)
    return dataclasses.replace(table, notes=(*table.notes, f"the plan is written to {path}"))


def _plan_table(plan: PrecisionPlan) -> Table:
    """The table with a row for each layer of a plan."""
    total = sum(one.multiply_adds or 0 for one in plan.modules)
    products = list(plan.target_sqnr)
    usual, exceptions = _usual_recipe(plan)
    rows = [
        (
            printable(one.module),
            one.recipe.name,
            one.recipe.bits,
            one.recipe.speed,
            *(one.sqnr.get(product) for product in products),
            min(one.worst_sqnr.values(), default=None),
            *(one.worst_sqnr.get(product) for product in products),
            one.multiply_adds / total if one.multiply_adds and total else None,
            _mark(one, plan.target_sqnr),
            one.why,
        )
        for one in (*exceptions, *(one for one in plan.modules if one not in exceptions))
    ]
    shares = [f"{share:.1%} in {name}" for name, share in plan.multiply_adds.items()]
    notes = [_headline(plan, usual=usual, exceptions=exceptions)]
    if plan.gap is not None:
        gap = plan.gap
        notes.append(
            f"{gap.product} of {printable(gap.module)} is {gap.below:.2g} dB below all other layers in {gap.recipe}"
        )
    margins = [one.margin(plan.target_sqnr) for one in plan.modules]
    if num_near := sum(margin is not None and margin < _SMALL_MARGIN for margin in margins):
        notes.append(f"{num_near} of {len(plan.modules)} layers exceed the target by less than {_SMALL_MARGIN:g} dB")
    if plan.bits_by_target:
        bits = [f"{plan.bits_by_target[target]:.3g} at {target}" for target in _SHOWN_TARGETS]
        notes.append(f"bits per element by target in dB: {', '.join(bits)}")
    notes += [f"multiply-adds: {', '.join(shares)}"] if shares else []
    if shares:
        notes.append(
            f"{plan.mean_bits:.3g} bits per element; products take {plan.relative_gemm_time:.1%} of the time of bf16 "
            "on hardware with these recipes, without the time for quantising"
        )
    notes.append("the SQNR is that of all calls combined, relative to the products of the recorded operands in float32")
    target = ", ".join(f"{product} {decibels:g}" for product, decibels in plan.target_sqnr.items())
    return Table(
        title=f"cheapest recipes of {len(plan.modules)} linear layers that reach the target SQNR in dB: {target}",
        columns=(
            key_column("module", is_detail=False),
            *PLAN_COLUMNS,
            *(Column(name=f"{one}.sqnr", kind=Kind.FLOAT, head=one, unit="dB") for one in products),
            Column(name="worst_sqnr", kind=Kind.FLOAT, head="worst", unit="dB"),
            *(
                Column(name=f"{one}.worst_sqnr", kind=Kind.FLOAT, head=f"{one}, worst call", unit="dB", is_detail=True)
                for one in products
            ),
            Column(name="multiply_adds.ratio", kind=Kind.RATIO, head="multiply-adds"),
            Column(name="mark", kind=Kind.TEXT),
            Column(name="why", kind=Kind.TEXT),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )


_SHOWN_TARGETS = range(10, 31, 4)
"""The targets, in dB, for which a note gives the bits per element."""

_SMALL_MARGIN = 1.0
"""A layer less than this above its target, in dB, is counted as one that barely reaches it."""

_MARKED_MARGIN = 3.0
"""A call at least this far below its target, in dB, is marked: it has twice the noise that the target allows. Calls
vary, so that about half are below the mean even if the mean reaches the target."""


def _usual_recipe(plan: PrecisionPlan) -> tuple[str, list[PlannedModule]]:
    """The recipe of most layers, and the layers with another one, the most expensive first."""
    usual = max(plan.by_recipe().items(), key=lambda item: len(item[1]))[0]
    exceptions = [one for one in plan.modules if one.recipe.name != usual]
    return usual, sorted(exceptions, key=lambda one: (one.recipe.speed, -one.recipe.bits))


def _headline(plan: PrecisionPlan, *, usual: str, exceptions: Sequence[PlannedModule]) -> str:
    """The number of layers with the usual recipe, and the names of the others."""
    count = f"{len(plan.modules) - len(exceptions)} of {len(plan.modules)} layers get {usual}"
    if not exceptions:
        return count
    named = [f"{printable(one.module)} ({one.recipe.name})" for one in exceptions[:_MAX_NAMED]]
    more = f" and {len(exceptions) - _MAX_NAMED} more" if len(exceptions) > _MAX_NAMED else ""
    return f"{count}; exceptions: {', '.join(named)}{more}"


def _mark(one: PlannedModule, target_sqnr: Mapping[str, float]) -> str | None:
    """A warning for a layer whose worst call has at least twice the noise that the target allows; None otherwise."""
    worst = one.worst_margin(target_sqnr)
    return f"worst call {-worst:.2g} dB below target" if worst is not None and worst <= -_MARKED_MARGIN else None


def _fields(records: Records, by: Sequence[str]) -> tuple[str, ...]:
    """The fields of a row: the requested ones, or the layer by default, and always the product and the recipe."""
    for name in by:
        if name in IDENTITY and name not in GROUP_FIELDS:
            raise UnknownFieldError(f"--by {name} is a field of tensors, but rows are products: use --by product")
        if name not in GROUP_FIELDS:
            raise UnknownFieldError(f"--by {name!r:.60} is not a field of calls: {nearest(name, GROUP_FIELDS)}")
    layers = "module" if any(records.column("module").tolist()) else "layer_idx"
    return tuple(dict.fromkeys((*with_stacks(by or (layers,), records), "product", "recipe")))


def _check_calls(calls: RecordedCalls) -> None:
    if not calls.calls and not calls.left_out:
        raise NoRecordsError(
            "no product of a linear layer is selected: filters select products by their results (output, grad_input "
            f"and grad_weight), of layers with the layer_type or component {LINEAR}"
        )
    if not calls.calls:
        raise NoRecordsError(f"{_none_of(calls)}; --show unreplayable lists them")


def _none_of(calls: RecordedCalls) -> str:
    return f"none of {len(calls.left_out)} products can be computed again: {_counted(_reasons(calls))}"


def _cells(group: ReplayedGroup, replayed: Replayed, places: Sequence[str]) -> tuple[Any, ...]:
    """The cells of `COLUMNS`."""
    exact, worst = group.exact, replayed.calls.calls[replayed.places[group.worst]]
    errors = [getattr(exact, column.name) for column in ERROR_COLUMNS[:-1]]
    is_several = len(group.rows) > 1
    is_gradient = str(replayed.products[group.worst]).startswith("grad_")
    return (
        group.num_calls,
        *errors,
        exact.norm_ratio if is_gradient else None,
        replayed.sums(group.median).sqnr,
        replayed.sums(group.worst).sqnr if is_several else None,
        printable(" ".join(f"{name} {worst.field(name)}" for name in places)) if is_several else None,
        group.recorded.sqnr,
        *(int(getattr(exact, name)) for name in ("num_elements", "num_compared", "num_lost")),
    )


def _worst_first(table: Table) -> Table:
    """The rows by SQNR, first those with NaN or Inf from finite operands; recorded results are last."""

    def order(row: dict[str, Any]) -> tuple[bool, bool, float]:
        sqnr = row["sqnr"]
        return row["recipe"] == RECORDED, not row["lost"], math.inf if sqnr is None else sqnr

    ordered = sorted(zip(map(order, table.records()), table.rows, strict=True), key=operator.itemgetter(0))
    return dataclasses.replace(table, rows=tuple(row for _, row in ordered))


def _notes(replayed: Replayed, recipes: Sequence[Recipe], *, has_bias: bool) -> Iterator[str]:
    """Notes about what was compared and what was not."""
    calls = replayed.calls
    yield f"{RECORDED}: the error of the recorded results, from the training's own rounding"
    yield "against recorded: the recipe's product relative to the recorded result"
    if has_bias:
        yield "bias: the mean error over its standard error; magnitudes above about 4 are significant"
    for recipe in recipes:
        modules = {call.field("module"): calls.recipe_of(call, recipe) for call in calls.calls}
        num_left = sum(own != recipe for own in modules.values())
        if num_left:
            yield f"{recipe.name} leaves {num_left} of {len(modules)} modules in bf16"
    if any(call.samples for call in calls.calls):
        yield "each sample has its own rows of the products; scales are those of the whole call with all samples"
    num_lost = int(replayed.exact[:, ErrorSums.__slots__.index("num_lost")].sum())
    if num_lost:
        yield f"{num_lost} elements are NaN or infinite where the product of the recorded operands is finite"
    if calls.left_out:
        counted = _counted(_reasons(calls))
        yield f"{len(calls.left_out)} products cannot be computed again: {counted}; --show unreplayable lists them"
    whys = Counter(why for call in calls.calls for why in call.products.values() if why)
    if whys:
        yield f"{whys.total()} recorded results are not compared: {_counted(whys)}"
    unknown = sum("output" in call.rows and not call.is_bias_known for call in calls.calls)
    if unknown:
        yield (
            f"the bias of {unknown} calls is unknown: the part that all tokens of a recorded output share beyond their "
            "products is subtracted from it"
        )
    assembled = sum(call.is_assembled for call in calls.calls)
    if assembled:
        yield f"{assembled} calls are assembled from the records of all ranks of a mesh"
    yield from _mismatch_notes(replayed)


def _mismatch_notes(replayed: Replayed) -> Iterator[str]:
    """A note about recorded results that are not products of the recorded operands."""
    is_mismatch = (replayed.names == RECORDED) & (replayed.badness > 10 ** (-_MIN_MATCHING_SQNR / 10))
    if is_mismatch.any():
        modules = Counter(replayed.calls.calls[place].field("module") for place in replayed.places[is_mismatch])
        yield (
            f"{modules.total()} recorded results are not the products of the recorded operands (SQNR below "
            f"{_MIN_MATCHING_SQNR:g} dB), so the layer multiplied other values: {_counted(modules)}"
        )


def _reasons(calls: RecordedCalls) -> Counter[str]:
    return Counter(one.reason for one in calls.left_out)


def _counted(counts: Counter[str]) -> str:
    named = [printable(f"{name} ({count})") for name, count in counts.most_common(_MAX_NAMED)]
    rest = len(counts) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")


_DETAILS = ("attempt", "mode", "layer_stack", "component")
"""Fields of a call that text shows only on request."""
