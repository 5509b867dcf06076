"""Gives the command that brings a precision plan to those who train with it: `export-plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ranktape.errors import UsageError
from ranktape.launch.place import CommandAnswer, command_of, count_text


def export_plan(
    plan: Path, output: Path, *, form: Literal["transformer_engine", "torchao"] = "transformer_engine"
) -> int:
    """Write the precision plan PLAN for another program into OUTPUT, and say of how many modules it was.

    transformer_engine is the YAML file for Megatron-core's --te-precision-config-file: each layer trains in its recipe.
    torchao is the JSON of a FqnToConfig, for quantize_ (inference: needs torchao, and for some recipes the hardware).

    Args:
        plan (PLAN): The file of the plan.
        output (OUTPUT): The file to write; what is there is replaced.
        form: For whom.
    """
    from ranktape.analyze.numerics.recipes.plan_export import torchao_text, transformer_engine_text
    from ranktape.analyze.numerics.recipes.plan_file import read_plan

    read = read_plan(plan)
    text = torchao_text(read) if form == "torchao" else transformer_engine_text(read)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written ({error.strerror}): give a file that can be") from error
    return len(read.modules)


@command_of(export_plan, has_json=False)
def export_plan_command(num_modules: int, given: Mapping[str, Any]) -> CommandAnswer:
    """What was written."""
    return CommandAnswer(text=f"{given['output']}: the recipes of {count_text(num_modules, 'module')}")
