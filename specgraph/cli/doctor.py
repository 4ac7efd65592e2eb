"""``python -m specgraph doctor``: what this machine runs, and what to install for the rest.

It is for machines on which something is missing or broken. So this module imports only the standard library at its top,
every part of the report is made on its own, and decoding is tried in a process of its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ABOUT = "say what this machine runs, and what to install for the rest"
HELP = f"""python -m specgraph doctor: {ABOUT}

usage: python -m specgraph doctor [decode=false]

It decodes a few tokens with a tiny random model on the CPU and on every GPU, which takes up to a minute for
each. decode=false leaves that out and looks only at what is installed. The exit code is 0 if decoding works on
some device, and else 1."""
PURPOSES = {
    "accelerate": "evaluation by lm_eval --model specgraph",
    "datasets": "examples/reinforce.py",
    "fastapi": "examples/serve.py",
    "gguf": "model=FILE.gguf of generate",
    "llguidance": "json_schema, regex and grammar of generate",
    "lm_eval": "evaluation by lm_eval --model specgraph",
    "matplotlib": "the key plot of generate and bench, and the loss curves of train",
    "pyarrow": "engine=ray of generate",
    "ray": "engine=ray of generate and for examples/serve.py",
    "starlette": "examples/serve.py",
    "tokenizers": "the command train",
    "trl": "examples/reinforce.py",
}
"""The purpose of each optional package. The extras of the installed specgraph say which packages are optional."""
_PATIENCE = 600
"""Seconds until an attempt to decode counts as failed."""
_FOR_DEVELOPERS = ("dev", "site")
_SOURCE = """#include <Python.h>
#include <cmath>
extern "C" double f(double x) { return std::sqrt(x); }
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name, text: what it is about, and what was found.
        advice: what to do about it, as a sentence; None if all is well.
        broken: whether something that every decoder needs is missing.
        works: whether a decoder has run; None if it is not about that.
    """

    name: str
    text: str
    advice: str | None = None
    broken: bool = False
    works: bool | None = None


def doctor(arguments: Sequence[str]) -> int:
    """Print the report.

    Returns:
        The exit code: 0 if this machine can decode on some device, 1 if it cannot, 2 for arguments that are not known.
    """
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    known = ("decode=true", "decode=false")
    if unknown := [argument for argument in arguments if argument not in known]:
        print(f"error: doctor does not take {unknown[0]!r}; it takes {' or '.join(known)}.", file=sys.stderr)
        return 2
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "Versions": versions, "Devices": devices, "Compilers": compilers, "What runs": what_runs,
        "Optional parts": optional_parts,
    }  # fmt: skip
    if "decode=false" not in arguments:
        parts["Decoding"] = decoding
    found = [finding for title, part in parts.items() for finding in _show(title, part)]
    return _conclude(found)


def _show(title: str, part: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Print one part of the report, each line as soon as it is known."""
    print(f"== {title} ==", flush=True)
    found = []
    for finding in _guarded(part):
        print(f"{finding.name:<20}{finding.text}", flush=True)
        found.append(finding)
    print()
    return found


def _guarded(part: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a part. An error in it is a finding, too, and ends this part alone."""
    try:
        yield from part()
    except (Exception, SystemExit) as error:  # a broken installation may raise anything
        reason = f"{type(error).__name__}: {_first_line(str(error))}"
        yield Finding("not known", reason, f"Find out why this fails: {reason}", broken=True)


def _conclude(found: Sequence[Finding]) -> int:
    advice = list(dict.fromkeys(finding.advice for finding in found if finding.advice is not None))
    tried = [finding.works for finding in found if finding.works is not None]
    works = any(tried) if tried else not any(finding.broken for finding in found)
    if advice:
        print("== What to do ==")
        print("\n".join(f"- {line}" for line in advice) + "\n")
    print("specgraph can decode on this machine." if works else "specgraph cannot decode on this machine.")
    return 0 if works else 1


def versions() -> Iterator[Finding]:
    """specgraph, Python, and the packages that specgraph requires, with what is missing or too old."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    needed = [_installed(), *(_required(requirement) for requirement in _requirements() if requirement.extra is None)]
    if any(finding.broken for finding in needed):
        yield from _environment()
    yield from needed


def _installed() -> Finding:
    """The version of specgraph, and whether what is imported is all of it and what this folder holds."""
    package, below = Path(__file__).resolve().parents[1], [Path.cwd(), *Path.cwd().parents]
    install = f"python -m pip install -e {package.parent}"
    try:
        version = metadata.version("specgraph")
    except metadata.PackageNotFoundError:
        return Finding("specgraph", "runs without being installed", f"Install specgraph: {install}", broken=True)
    if importlib.util.find_spec("specgraph.kernels") is None:
        text = f"{version}, but {package} has no kernels: it is not installed, or it hides a copy that is"
        return Finding("specgraph", text, f"Install this folder itself, and not a copy: {install}", broken=True)
    sources = next((folder for folder in below if (folder / "specgraph" / "cli" / "doctor.py").is_file()), None)
    if sources is None or sources.resolve() == package.parent:
        return Finding("specgraph", version)
    advice = f"To run the code in {sources}, install that folder: python -m pip install -e {sources}"
    return Finding("specgraph", f"{version}, the copy in {package}, which hides that in {sources}", advice)


def _environment() -> Iterator[Finding]:
    """The environment that ``make install`` has made beside the sources, if this is another one."""
    for folder in dict.fromkeys((Path.cwd(), Path(__file__).resolve().parents[2])):
        venv = folder / ".venv"
        if (venv / ".ready").is_file() and venv.resolve() != Path(sys.prefix).resolve():
            advice = f"Use the environment that make has made: source {venv / 'bin' / 'activate'}"
            yield Finding(".venv", f"{venv} is ready, but this is another Python", advice)
            return


@dataclass(frozen=True)
class _Requirement:
    name: str
    least: str
    extra: str | None

    @property
    def command(self) -> str:
        return f"python -m pip install '{self.name}{'>=' + self.least if self.least else ''}'"


@functools.cache
def _requirements() -> tuple[_Requirement, ...]:
    """The packages that specgraph requires, and those of its extras; none if it is not installed.

    The names and lower bounds are read with a pattern, because the package ``packaging`` may be missing.
    """
    try:
        lines = metadata.requires("specgraph") or []
    except metadata.PackageNotFoundError:
        lines = []
    matches = [re.match(r"([\w.-]+)(?:\[.*?\])?(?:[^;]*?>=\s*([\w.]+))?[^;]*(?:;.*extra\s*==\s*[\"'](\w+))?", line)
               for line in lines]  # fmt: skip
    return tuple(_Requirement(match[1], match[2] or "", match[3]) for match in matches if match is not None)


def _required(requirement: _Requirement) -> Finding:
    """Whether a package is installed, is new enough, and can be imported."""
    name, least = requirement.name, requirement.least
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", f"Install {name}: {requirement.command}", broken=True)
    if _numbers(version) < _numbers(least):
        return Finding(name, f"{version}, but {least} is needed", f"Update {name}: {requirement.command}", broken=True)
    return Finding(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without what follows it: 2.13.0+cu128 is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def devices() -> Iterator[Finding]:
    """The CPU, and the GPUs that PyTorch sees."""
    torch: Any = importlib.import_module("torch")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    features = torch.backends.cpu.get_cpu_capability()
    yield Finding("CPU", f"{_cpu_name()}, {usable} of {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
                         f"{features}, {_memory()}")  # fmt: skip
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "PyTorch sees none" if built else "this PyTorch was built without CUDA"
        yield Finding("GPU", f"none: {reason}", None if built else _CUDA_ADVICE)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute "
                                      f"capability {properties.major}.{properties.minor}")  # fmt: skip
    if torch.cuda.device_count() > 1:
        yield _reach(torch.cuda.device_count(), torch.cuda.can_device_access_peer)


def _reach(count: int, reaches: Callable[[int, int], bool]) -> Finding:
    """Whether every GPU reaches the memory of every other one, as those do that share a target."""
    pairs = itertools.combinations(range(count), 2)
    apart = [f"{a} and {b}" for a, b in pairs if not (reaches(a, b) and reaches(b, a))]
    if not apart:
        return Finding("several GPUs", f"all {count} reach each other's memory, so they can share a target (parallel)")
    return Finding(
        "several GPUs", f"{', '.join(apart)} cannot reach each other's memory, so they cannot share a target"
    )


_CUDA_ADVICE = "If this machine has a GPU, install PyTorch with CUDA, as https://pytorch.org says."


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "memory not known"
    return f"{total / 2**30:.0f} GiB of memory"


def compilers() -> Iterator[Finding]:
    """The C++ compiler with which Inductor compiles for a CPU, and Triton with what it needs for a GPU."""
    from specgraph.config.lowering import compiler, missing_for_inductor

    missing = missing_for_inductor()
    if missing is not None:
        yield Finding("C++ (CPU)", missing, f"For faster decoding on the CPU: {missing}")
    else:
        refused = _refused_by(compiler())
        done = _run([compiler(), "--version"], 60)
        text = f"{compiler()}: {_first_line(done.stdout or done.stderr)}"
        advice = f"Repair the C++ compiler {compiler()}, or decode with lowering=eager: it fails with {refused}"
        yield Finding("C++ (CPU)", text if refused is None else f"{text}; it does not compile: {refused}",
                      None if refused is None else advice)  # fmt: skip
    torch: Any = importlib.import_module("torch")
    triton: Any = importlib.import_module("triton")
    if not torch.cuda.is_available():
        yield Finding("Triton (GPU)", f"{triton.__version__}, not used without a GPU")
    elif (c_compiler := os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")) is None:
        yield Finding("Triton (GPU)", f"{triton.__version__}, but there is no C compiler, with which Triton starts",
                      "Install gcc, which Triton needs for the GPU.")  # fmt: skip
    else:
        yield Finding("Triton (GPU)", f"{triton.__version__}, with {c_compiler}")


def _refused_by(compiler: str) -> str | None:
    """Why a C++ compiler does not compile a small source with Python's headers, or None if it does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.cpp"
        source.write_text(_SOURCE)
        include = f"-I{sysconfig.get_path('include')}"
        done = _run([compiler, "-shared", "-fPIC", include, str(source), "-o", str(source.with_suffix(".so"))], 60)
    return None if done.returncode == 0 else _first_line(done.stderr)


def what_runs() -> Iterator[Finding]:
    """The lowering that ``auto`` chooses for a model on each device, the variants of our ops there, and how weights in
    few bits are multiplied.
    """
    from specgraph.config.lowering import choose_lowering

    torch: Any = importlib.import_module("torch")
    importlib.import_module("specgraph.kernels.catalogue")
    dtypes = {"cpu": torch.float32, "cuda": torch.bfloat16}
    for device in _places(torch):
        kind = device.partition(":")[0]
        lowering, reason = choose_lowering("auto", device, dtypes[kind])
        captured = ", one CUDA graph per step" if lowering == "gpu" else ""
        yield Finding(f"model on {device}", f"lowering={lowering}{captured}, because {reason}")
        for variant, ops in _variants(kind, torch.device(device)).items():
            yield Finding(f"  {variant}", ops)
        for way, formats in _ways(kind, torch.device(device)).items():
            yield Finding(f"  packed, {way}", f"{_WAYS[way]}: {', '.join(formats)}")


_WAYS = {
    "hopper": "numbers expanded in registers, in kernels for Hopper",
    "triton": "numbers expanded in registers, in Triton kernels",
    "cpu": "numbers expanded in registers, in C++ compiled for this CPU",
    "whole": "the weight made in float32 for each product",
}
"""What the ways of :mod:`specgraph.kernels.packed.ways` are."""


def _ways(kind: str, device: Any) -> dict[str, list[str]]:
    """The formats of packed weights by the way in which products with them are computed on a device.

    Stacks of experts are named where they have another way than linear layers.
    """
    import specgraph.ir.packed  # noqa: F401  (says how C++ is compiled)
    from specgraph.kernels.packed.ways import WAYS, published, way_of

    found: dict[str, list[str]] = {way: [] for way in WAYS}
    for form in published():
        way = way_of(form, kind, device)
        found[way].append(form.name)
        of_experts = way if form.own_inputs else way_of(form, kind, device, stacked=True)
        if of_experts != way:
            found[of_experts].append(f"experts in {form.name}")
    return {way: formats for way, formats in found.items() if formats}


def _places(torch: Any) -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _variants(kind: str, device: Any) -> dict[str, str]:
    """The ops of specgraph by the variant that is asked first on a device.

    Of the variant that most ops have, they are only counted.
    """
    from specgraph.kernels.launch import runs_gluon
    from specgraph.kernels.ops import OPS

    left_out = set() if kind == "cuda" and runs_gluon(device) else {"hopper"}
    chosen: dict[str, list[str]] = {}
    for op in OPS.values():
        variant = next(v for v in op.on(kind) if v.name not in left_out)
        chosen.setdefault(variant.name, []).append(op.name)
    most = max(chosen, key=lambda name: len(chosen[name]))
    return {
        {"reference": "plain PyTorch"}.get(name, name): f"{len(ops)} ops"
        + ("" if name == most else f": {', '.join(ops)}")
        for name, ops in chosen.items()
    }


def optional_parts() -> Iterator[Finding]:
    """The packages of specgraph's extras, except those for developers."""
    extras = {r.name: r for r in _requirements() if r.extra not in (None, *_FOR_DEVELOPERS)}
    for name in sorted(extras.keys() - _always_there()):
        purpose = PURPOSES.get(name, f"the extra {extras[name].extra}")
        finding = _required(extras[name])
        advice = None if finding.advice is None else f"For {purpose}: {extras[name].command}"
        yield Finding(name, f"{finding.text}, for {purpose}", advice)


def _always_there() -> set[str]:
    return {requirement.name for requirement in _requirements() if requirement.extra is None}


def decoding() -> Iterator[Finding]:
    """Whether a tiny model can be decoded on each device, with the lowering that is chosen there or without one."""
    torch: Any = importlib.import_module("torch")
    for device in _places(torch):
        finding = _decode(device, "auto")
        yield finding
        if not finding.works:
            plain = _decode(device, "eager")
            advice = f"Decode on {device} with lowering=eager until this is repaired: {finding.text}"
            yield Finding(plain.name, plain.text, advice if plain.works else plain.advice, works=plain.works is True)


def _decode(device: str, lowering: str) -> Finding:
    name = f"decode on {device}"
    done = _run([sys.executable, "-m", "specgraph.cli.try_decoding", device, lowering], _PATIENCE)
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except (ValueError, IndexError):
        result = None
    if result is None:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with code {done.returncode}"
        return Finding(name, f"lowering={lowering} fails: {reason}", f"On {device}, see to this: {reason}", works=False)
    graph = " and a CUDA graph" if result["cuda_graph"] else ""
    return Finding(name, f"works with lowering={result['lowering']}{graph}, {result['seconds']:.0f} s", works=True)


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program; one that cannot start or takes too long ends with a code and says why on standard error."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"it took more than {seconds:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _first_line(text: str) -> str:
    return (text.strip() or "no reason was given").splitlines()[0]
