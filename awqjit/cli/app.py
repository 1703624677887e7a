# SPDX-License-Identifier: Apache-2.0
"""The commands: arguments in, results out. What they do is done elsewhere."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from awqjit.cli.cache import app as cache_app
from awqjit.cli.common import (
    Compute,
    ComputeOption,
    Dtype,
    DtypeOption,
    Folder,
    Form,
    JsonOption,
    Method,
    plain_warnings,
    print_json,
    table_of,
    wrapped,
)
from awqjit.cli.tune import command as tune_command
from awqjit.spec import Problem
from awqjit.version import __version__

app = typer.Typer(
    help="int4 models in PyTorch, on kernels generated and compiled for their shapes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cache_app, name="cache")
app.command("tune")(tune_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"awqjit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.with_resource(plain_warnings())


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="int4 folder or hub id to use instead of SmolLM2-135M.")] = None,
    compute: ComputeOption = Compute.w4a16,
    as_json: JsonOption = False,
) -> None:
    """Fetch a small real model, quantize it, let it answer a question, and show kernels, speed and memory."""
    from awqjit.cli.demo import run

    result = run(model, compute.value, quiet=as_json)
    if as_json:
        print_json(result.to_dict())
    else:
        Console(width=min(80, Console().width)).print(result.table())
        for note in (*result.passed_over, *result.notes):
            print(wrapped(note))
    if not result.right:
        print("The answer does not contain 'Paris': something is wrong with these kernels.", flush=True)
        raise typer.Exit(1)


@app.command()
def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Argument(help="The question; goes through the model's chat template if it has one.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 256,
    compute: ComputeOption = Compute.w4a16,
    dtype: DtypeOption = Dtype.bfloat16,
    lm_head: Annotated[
        Compute | None, typer.Option(help="Round a float output layer to int4 too: faster, a little less accurate.")
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fuse", help="Run gate and up projections as one layer: the same results.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Let a model continue a prompt, greedily, and print the text as it comes."""
    from awqjit.cli.generate import load, stream

    head = None if lm_head is None else lm_head.value
    model, tokenizer = load(folder, dtype.value, compute.value, lm_head=head, fused=fused)
    show = (lambda text: None) if as_json else (lambda text: print(text, end="", flush=True))
    run = stream(model, tokenizer, prompt, max_new_tokens=max_new_tokens, write=show, raw=raw)
    if as_json:
        print_json(run.to_dict())
    else:
        print()


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Float transformers folder (safetensors), or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share a scale: 32, 64, 128, or -1 for a column; not all readers take others "
            "(default: the largest of 128, 64, 32, 16 that divides every layer)."
        ),
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Every zero point is 8.")] = False,
    method: Annotated[
        Method, typer.Option(help="awq: calibrate on a text; clip: look at the weights alone; round: no search.")
    ] = Method.awq,
    format: Annotated[Form | None, typer.Option(help="Form to write (default: awq; gptq with --symmetric).")] = None,
    text: Annotated[Path | None, typer.Option(help="Calibration text instead of the one that comes along.")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave these layers float: names, or parts between dots. Repeatable.")
    ] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Largest safetensors file, in MiB.")] = 1024,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at the destination.")] = False,
) -> None:
    """Write an int4 folder, in the AWQ or GPTQ form, from a float model."""
    from awqjit.cli.quantize import lines, plan_lines, run

    report = run(
        source,
        destination,
        method=method,
        form=format,
        symmetric=symmetric,
        text=text,
        group_size=group_size,
        skip=tuple(skip or ()),
        shard_bytes=shard_size << 20,
        force=force,
        announce=lambda plan: print("\n".join(plan_lines(plan)), flush=True),
    )
    for line in lines(report):
        print(line)


@app.command("eval")
def evaluate(
    folder: Folder,
    text: Annotated[Path | None, typer.Option(help="Text to predict instead of the one that comes along.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Use this much of the text.")] = 2048,
    dtype: DtypeOption = Dtype.bfloat16,
    as_json: JsonOption = False,
) -> None:
    """Show what w4a16 and w4a8 cost in accuracy, against the same int4 weights dequantized."""
    from awqjit.cli.eval import run, table

    found = run(folder, text, tokens, dtype.value, quiet=as_json)
    if as_json:
        print_json(found.to_dict())
    else:
        Console().print(table(found))


@app.command()
def info(as_json: JsonOption = False) -> None:
    """Show versions, CPU and kernel rows, compilers, caches, threads and settings, each with the reason why."""
    from awqjit.cli.info import collect, lines

    found = collect()
    if as_json:
        print_json(found)
        return
    table = table_of(f"awqjit {__version__}", "what", "value")
    for what, value in lines(found):
        table.add_row(what, escape(value))
    Console().print(table)


@app.command()
def bench(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="KxN", help="Layers, for example 4096x11008 (default: 4096x4096).")
    ] = None,
    m: Annotated[list[int] | None, typer.Option(min=1, help="Rows of x (default: 1, 16, 256). Repeatable.")] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale; -1 for K.")] = 128,
    dtype: DtypeOption = Dtype.bfloat16,
    seconds: Annotated[float, typer.Option(min=0, help="Of calls, for each contender, layer and M.")] = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Time int4 layers in both modes beside dense torch and torch's own int4 kernel."""
    from awqjit.cli.bench import read_shape, run, tables
    from awqjit.integrations.transformers import resolve_dtype

    activations = resolve_dtype("bfloat16" if dtype is Dtype.auto else dtype.value, None)
    layers = [read_shape(shape) for shape in shapes or ["4096x4096"]]
    result = run(layers, m or [1, 16, 256], group_size, activations, seconds, quiet=as_json)
    if as_json:
        print_json(result.to_dict())
    else:
        for shown in tables(result):
            Console().print(shown)
        for name, reason in result.absent.items():
            print(f"{name}: {reason}")
    if not result.right:
        print("A kernel's result is not what its arithmetic allows.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def explain(
    what: Annotated[
        list[str], typer.Argument(metavar="K N | KxN | FOLDER", help="A layer's in and out features, or a model.")
    ],
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale (128); -1 for K. Not for a folder.")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="No zero points. Not for a folder.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias. Not for a folder.")] = False,
    compute: ComputeOption = Compute.w4a16,
    dtype: DtypeOption = Dtype.bfloat16,
    device: Annotated[str, typer.Option(help="Where the layer is: cpu, or a GPU's type such as xpu.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Show which kernel a layer gets, and for every other one why not."""
    from awqjit.cli.info import explain_problems, folder_problems, shape_problem

    if len(what) == 1 and re.fullmatch(r"\d+[xX]\d+", what[0]):
        what = what[0].lower().split("x")
    if len(what) == 1 and what[0].isdecimal():
        raise typer.BadParameter(f"{what[0]} is only K: give K and N, or a folder")
    if len(what) == 1 and (group_size is not None or symmetric or bias):
        raise typer.BadParameter("--group-size, --symmetric and --bias describe a layer; a folder has its own")
    group_size = 128 if group_size is None else group_size
    if len(what) == 2:
        shape = shape_problem(what[0], what[1], group_size, symmetric, bias, compute.value, dtype.value)
        problems: tuple[Problem, ...] = (shape,)
    elif len(what) == 1:
        problems = folder_problems(what[0], compute.value, dtype.value)
    else:
        raise typer.BadParameter("give K and N, or a folder")
    rows = explain_problems(problems, device)
    if as_json:
        print_json(rows)
        return
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(json.dumps(row["rows"]), []).append(row["problem"])
    for verdicts, slugs in alike.items():
        table = table_of("\n".join(slugs), "kernel", "chosen", "reason")
        for verdict in json.loads(verdicts):
            table.add_row(verdict["kernel"], "yes" if verdict["chosen"] else "", escape(verdict["reason"]))
        Console().print(table)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder of an int4 model.")],
    dtype: DtypeOption = Dtype.bfloat16,
    as_json: JsonOption = False,
) -> None:
    """Show what an int4 folder holds, whether its numbers fit its labels, and which kernels it gets here."""
    from awqjit.cli.inspect import lines, to_dict
    from awqjit.inspect_folder import inspect_folder
    from awqjit.machine import detect

    report = inspect_folder(folder, show_progress=not as_json)
    if as_json:
        print_json(to_dict(report, detect(), dtype.value))
    else:
        for line in lines(report, detect(), dtype.value):
            print(line)


@app.command()
def warm(folder: Folder, compute: ComputeOption = Compute.w4a16, dtype: DtypeOption = Dtype.bfloat16) -> None:
    """Compile all kernels of a model into the cache."""
    from awqjit import config, jit
    from awqjit.cli.info import folder_problems

    table = table_of("kernels", "problem", "kernel", "from", "compiled in", "ready in")
    done = jit.warm(folder_problems(folder, compute.value, dtype.value))
    for choice in done:
        table.add_row(
            choice.problem.slug,
            choice.kernel.name,
            choice.origin,
            f"{choice.compile_seconds:.2f} s" if choice.compile_seconds else "",
            f"{choice.seconds:.3f} s",
        )
    Console().print(table)
    compiled = sum(choice.kernel.name not in jit.WITHOUT_COMPILER for choice in done)
    print(f"{compiled} of {len(done)} kernels compiled")
    if done and not compiled and config.KERNEL.read() is None:  # a row asked for by name is what was wanted
        raise typer.Exit(1)
