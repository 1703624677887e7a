# SPDX-License-Identifier: Apache-2.0
"""The commands: arguments in, results out. What they do is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from awqjit.cli.cache import app as cache_app
from awqjit.cli.common import Compute, ComputeOption, Dtype, DtypeOption, Folder, JsonOption, print_json, table_of
from awqjit.spec import Problem
from awqjit.version import __version__

app = typer.Typer(
    help="int4 models in PyTorch, on kernels generated and compiled for their shapes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"awqjit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="AWQ or GPTQ folder to use instead of SmolLM2-135M.")] = None,
    compute: ComputeOption = Compute.w4a16,
    as_json: JsonOption = False,
) -> None:
    """Fetch a small real model, quantize it, let it answer a question, and show kernels, speed and memory."""
    from awqjit.cli.demo import run

    result = run(model, compute.value, quiet=as_json)
    if as_json:
        print_json(result.to_dict())
    else:
        Console().print(result.table())
        for note in result.notes:
            print(note)
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Let a model continue a prompt, greedily, and print the text as it comes."""
    from awqjit.cli.generate import load, stream

    model, tokenizer = load(folder, dtype.value, compute.value)
    show = (lambda text: None) if as_json else (lambda text: print(text, end="", flush=True))
    run = stream(model, tokenizer, prompt, max_new_tokens=max_new_tokens, write=show, raw=raw)
    if as_json:
        print_json(run.to_dict())
    else:
        print()


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Float transformers folder (safetensors), or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="AWQ folder to write; must not exist or be empty.")],
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64, 128, or -1 for a column.")] = 128,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Every zero point is 8.")] = False,
    shard_size: Annotated[int, typer.Option(min=1, help="Largest safetensors file, in MiB.")] = 1024,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at the destination.")] = False,
) -> None:
    """Write an int4 AWQ folder from a float model."""
    from awqjit.integrations.quantize_folder import quantize_folder

    report = quantize_folder(
        source, destination, group_size=group_size, symmetric=symmetric, shard_bytes=shard_size << 20, force=force
    )
    by_reason: dict[str, list[str]] = {}
    for layer, reason in report.kept.items():
        by_reason.setdefault(reason, []).append(layer)
    for reason, layers in by_reason.items():
        print(f"float: {layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''} ({reason})")
    print(
        f"{len(report.quantized)} of {len(report.quantized) + len(report.kept)} layers quantized to "
        f"{report.destination}: {report.bytes_written / 1e6:.1f} MB in {report.seconds:.1f} s"
    )


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
def explain(
    what: Annotated[
        list[str], typer.Argument(metavar="K N | FOLDER", help="A layer's in and out features, or a model.")
    ],
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale (128); -1 for K. Not for a folder.")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="No zero points. Not for a folder.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias. Not for a folder.")] = False,
    compute: ComputeOption = Compute.w4a16,
    dtype: DtypeOption = Dtype.bfloat16,
    as_json: JsonOption = False,
) -> None:
    """Show which kernel a layer gets, and for every other one why not."""
    from awqjit.cli.info import explain_problems, folder_problems, shape_problem

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
    rows = explain_problems(problems)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        table = table_of(row["problem"], "kernel", "chosen", "reason")
        for verdict in row["rows"]:
            table.add_row(verdict["kernel"], "yes" if verdict["chosen"] else "", escape(verdict["reason"]))
        Console().print(table)


@app.command()
def warm(folder: Folder, compute: ComputeOption = Compute.w4a16, dtype: DtypeOption = Dtype.bfloat16) -> None:
    """Compile all kernels of a model into the cache."""
    from awqjit import jit
    from awqjit.cli.info import folder_problems

    table = table_of("kernels", "problem", "kernel", "from", "compiled in", "ready in")
    for choice in jit.warm(folder_problems(folder, compute.value, dtype.value)):
        table.add_row(
            choice.problem.slug,
            choice.kernel.name,
            choice.origin,
            f"{choice.compile_seconds:.2f} s" if choice.compile_seconds else "",
            f"{choice.seconds:.3f} s",
        )
    Console().print(table)
