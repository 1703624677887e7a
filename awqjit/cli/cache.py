# SPDX-License-Identifier: Apache-2.0
"""``awqjit cache``: look at the kernel caches, check them, make them smaller, and fill one for an image."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from awqjit import upkeep
from awqjit.cli.common import Compute, Dtype, JsonOption, age, print_json, size, table_of
from awqjit.places import Place
from awqjit.upkeep import Item, Removal

app = typer.Typer(
    help="Look at the kernel caches, check them, make them smaller, or fill one for an image.", no_args_is_help=True
)

DirOption = Annotated[
    Path | None, typer.Option("--dir", help="This directory instead of the caches of the environment.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]


def _places(directory: Path | None) -> tuple[Place, ...]:
    return upkeep.all_places() if directory is None else (upkeep.named_place(directory),)


def _described(place: Place) -> dict[str, Any]:
    return {"directory": str(place.path), "origin": place.origin, "use": place.use, "reason": place.reason}


def _heading(place: Place, found: tuple[Item, ...]) -> str:
    reason = f" ({place.reason})" if place.reason else ""
    total = size(sum(item.bytes for item in found))
    return f"{place.path}: {place.origin}, {place.use}{reason}; entries: {len(found)}, {total}"


def _add(table: Table, item: Item, *more: str) -> None:
    now = time.time()
    name = item.path.name if item.kind == "kernel" else f"{item.path.name} ({item.kind})"
    table.add_row(escape(name), size(item.bytes), age(now - item.built), age(now - item.used), *map(escape, more))


@app.command("list")
def list_(directory: DirOption = None, as_json: JsonOption = False) -> None:
    """List what is stored: size, age and last use, for each place that is searched for kernels."""
    found = [(place, upkeep.items(place.path)) for place in _places(directory)]
    if as_json:
        print_json([_described(place) | {"items": [item.to_dict() for item in items]} for place, items in found])
        return
    for place, items in found:
        print(_heading(place, items))
        if items:
            table = table_of("", "kernel", "size", "built", "last used")
            for item in sorted(items, key=lambda item: -item.used):
                _add(table, item)
            Console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A kernel's name as `list` shows it, or the beginning of one or more.")],
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all that is known of a kernel or a tuning record, and whether it is sound."""
    rows = []
    for item in upkeep.find(tuple(place.path for place in _places(directory)), name):
        reason, meta = upkeep.described(item)
        rows.append(item.to_dict() | {"directory": str(item.path), "sound": not reason, "reason": reason, "meta": meta})
    if as_json:
        print_json(rows)
        return
    for row in rows:
        table = table_of(escape(str(row.pop("name"))), "what", "value")
        for key, value in (row | row.pop("meta")).items():
            table.add_row(key, escape(" ".join(map(str, value)) if isinstance(value, list) else str(value)))
        Console().print(table)


@app.command()
def verify(
    directory: DirOption = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged; it is built again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check all kernels and tuning records by their checksums. The exit code is 1 if a damaged one is left."""
    places = (upkeep.named_place(directory),) if remove else _places(directory)
    found = [(place, upkeep.verify(place, remove)) for place in places]
    left = sum(bool(finding.reason) and not finding.removed for _, findings in found for finding in findings)
    if as_json:
        print_json(
            [
                _described(place)
                | {
                    "items": [
                        finding.item.to_dict() | {"reason": finding.reason, "removed": finding.removed}
                        for finding in findings
                    ]
                }
                for place, findings in found
            ]
        )
    else:
        for place, findings in found:
            bad = [finding for finding in findings if finding.reason]
            print(f"{place.path}: {len(findings) - len(bad)} sound, {len(bad)} damaged")
            for finding in bad:
                print(f"  {finding.item.path.name}: {finding.reason}{'; removed' if finding.removed else ''}")
    if left:
        raise typer.Exit(1)


@app.command()
def prune(
    max_size: Annotated[
        str | None, typer.Option(help="Remove the least recently used until this much is left, for example 200MB.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="Remove what was not used for this long: 30d, 12h.")] = None,
    directory: DirOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove kernels that have not been used for long, from the cache that is written."""
    most = None if max_size is None else upkeep.parse_size(max_size)
    oldest = None if older_than is None else upkeep.parse_age(older_than)
    place = upkeep.named_place(directory)
    _report(place, upkeep.prune(place, most, oldest, dry_run), dry_run, as_json)


@app.command()
def clear(directory: DirOption = None, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Remove everything from the cache that is written, but for what is being built just now."""
    place = upkeep.named_place(directory)
    _report(place, upkeep.clear(place, dry_run), dry_run, as_json)


def _report(place: Place, done: Removal, dry_run: bool, as_json: bool) -> None:
    sums = {name: sum(item.bytes for item in getattr(done, name)) for name in ("removed", "kept")}
    if as_json:
        print_json(
            _described(place)
            | {
                "dry_run": dry_run,
                "removed": [item.to_dict() for item in done.removed],
                "removed_bytes": sums["removed"],
                "kept": [item.to_dict() for item in done.kept],
                "kept_bytes": sums["kept"],
                "failed": list(done.failed),
            }
        )
    else:
        if done.removed:
            table = table_of("would be removed" if dry_run else "removed", "kernel", "size", "built", "last used")
            for item in done.removed:
                _add(table, item)
            Console().print(table)
        print(
            f"{place.path}: {len(done.removed)} {'would be removed' if dry_run else 'removed'} "
            f"({size(sums['removed'])}), {len(done.kept)} left ({size(sums['kept'])})"
        )
        for problem in done.failed:
            print(f"  not removed: {problem}")
    if done.failed:
        raise typer.Exit(1)


@app.command()
def bake(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to fill; made if it does not exist.")],
    folders: Annotated[
        list[str], typer.Argument(metavar="FOLDER...", help="Models whose kernels go in: folders or hub ids.")
    ],
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="Of activations; may be repeated (default: bfloat16).")
    ] = None,
    compute: Annotated[list[Compute] | None, typer.Option(help="May be repeated (default: w4a16).")] = None,
    max_isa: Annotated[
        list[str] | None,
        typer.Option(help="For CPUs of this level (see `awqjit info`), not for this one; may be repeated."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="This row of the selection table, or all, whatever the CPU; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels of models into a directory for AWQJIT_CACHE_PATH: read by any user, never written."""
    from awqjit.bake import bake, obstacles, specs
    from awqjit.cli.info import baking_problems

    problems = baking_problems(
        folders,
        [one.value for one in compute or (Compute.w4a16,)],
        [one.value for one in dtype or (Dtype.bfloat16,)],
    )
    done = bake(directory, specs(problems, tuple(max_isa or ()), tuple(kernel or ())))
    notes = obstacles(directory)
    if as_json:
        rows = [
            {
                "name": one.path.name,
                "problem": one.spec.problem.slug,
                "kernel": one.spec.target.name,
                "bytes": one.bytes,
                "seconds": one.seconds,
            }
            for one in done
        ]
        print_json({"directory": str(directory.resolve()), "kernels": rows, "notes": notes})
        return
    table = table_of(escape(str(directory)), "problem", "kernel", "size", "compiled in")
    for one in done:
        seconds = f"{one.seconds:.2f} s" if one.seconds else "there already"
        table.add_row(one.spec.problem.slug, one.spec.target.name, size(one.bytes), seconds)
    Console().print(table)
    for note in notes:
        print(f"for other users: {note}")
    print(f"use it with AWQJIT_CACHE_PATH={directory.resolve()}")
