"""What is promised to fit beside this package, resolved: ``make resolve``. It installs nothing.

Each combination is asked of ``uv pip compile`` as a user would ask pip, for Linux on x86-64, Python 3.12 and wheels
alone. What this tree requires are the lists of its metadata, which are written without compiling anything. The
table that is printed is that of docs/vllm.md; the exit status is 1 if a combination has no solution.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BESIDE = (
    "",
    "vllm==0.32.0",
    "vllm==0.33.0",
    "flash-attn-4",
    "flashinfer-python",
)
EXTRAS = ("cuda", "cuda,compile")
SHOWN = ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl", "transformers")
# The C library of Ubuntu 22.04, which some wheels of vLLM's need.
PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35")


def requirements(folder: Path) -> list[str]:
    """What this tree requires, extras' markers included: the lines Requires-Dist of its metadata."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (metadata,) = folder.glob("*.egg-info/PKG-INFO")
    return Parser().parsestr(metadata.read_text("utf-8")).get_all("Requires-Dist", [])


def asked(required: list[str], extras: str) -> list[str]:
    """The lines of ``required`` for ``extras``, without the markers that name these and without the package itself."""
    found = []
    for line in required:
        extra = re.search(r"""extra == ["']([\w-]+)["']""", line)
        if extra is None or extra[1] in extras.split(","):
            bare = re.sub(r"""( and )?extra == ["'][\w-]+["']""", "", line)
            found.append(re.sub(r";\s*$", "", bare).strip())
    return [line for line in found if not line.startswith("torch-attnkit")]


def resolved(lines: list[str]) -> dict[str, str] | str:
    """Versions by package, or the words of the resolver for why there are none."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "-q", "--no-header", "--no-annotate"]
    # flash-attn-4 has prereleases alone, and vLLM asks for some of other packages.
    command += ["--prerelease", "if-necessary-or-explicit", "--only-binary", ":all:", *PLATFORM]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        required = requirements(Path(folder))
    failed = []
    print("| beside | extras | " + " | ".join(SHOWN) + " |\n" + "|---" * (2 + len(SHOWN)) + "|", flush=True)
    for beside in BESIDE:
        for extras in EXTRAS:
            found = resolved([*filter(None, [beside]), *asked(required, extras)])
            if isinstance(found, str):
                failed.append(f"{beside or 'nothing else'} with [{extras}]:\n{found}")
                found = {}
            cells = [found.get(name, "-") for name in SHOWN] if found else ["does not fit"] * len(SHOWN)
            name = beside.partition("==")[0]
            shown = f"{name} {found.get(name, '')}".strip() or "nothing else"
            print(f"| {shown} | `[{extras}]` | {' | '.join(cells)} |", flush=True)
    print(*failed, sep="\n\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
