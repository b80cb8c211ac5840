"""`octavo doctor`: checks whether this machine can run Octavo, and how it could run it better.

With --pid it shows the memory and processor use of another process from /proc, or of all processes
of a server.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from octavo import __version__
from octavo.cli.options import command, fail, flag, option
from octavo.cli.terminal import in_bytes
from octavo.config import EMBEDDED
from octavo.errors import ModelNotFound, OctavoError
from octavo.process_usage import read_usage

HUB_TIMEOUT = 2.0  # seconds

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2")
OPTIONAL = {
    "triton": "fast kernels on a GPU",
    "numba": "fast kernels on a CPU",
    "huggingface_hub": "models by their name on the hub",
    "tqdm": "progress bars",
}
CPU_EXTENSIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
}


class DoctorCheck(NamedTuple):
    state: str  # "ok" | "warn" | "fail"
    subject: str
    found: str  # what the check found, and what to do about it


@command
def doctor(
    smoke: Annotated[
        bool, flag("--smoke", "Also generate 5 tokens with the embedded model.")
    ] = False,
    pid: Annotated[
        int | None,
        option(
            "Show the resource usage of the process with this PID, and of its engine process if it "
            "is a server.",
            "Process",
            "N",
        ),
    ] = None,
    csv: Annotated[
        bool, flag("--csv", "Print the usage of --pid as CSV with a header.", "Process")
    ] = False,
    watch: Annotated[
        float | None,
        option(
            "Repeat the usage of --pid at this interval until the process ends.",
            "Process",
            "SECONDS",
        ),
    ] = None,
) -> None:
    """Check versions, processor, memory, GPU and models. Exits with 1 if a check fails."""
    if pid is not None:
        show_process(pid, csv, watch)
        return
    if csv or watch is not None:
        fail("--csv and --watch need --pid N")
    failed = False
    for check in checks(smoke):
        failed = failed or check.state == "fail"
        print(colour(check.state), f"{check.subject:<15}", check.found, flush=True)
    if failed:
        raise typer.Exit(1)


def colour(state: str) -> str:
    code = {"ok": 32, "warn": 33, "fail": 31}[state]
    return f"\x1b[{code}m{state:<4}\x1b[0m" if sys.stdout.isatty() else f"{state:<4}"


# ---- checks --------------------------------------------------------------------------------------


def checks(smoke: bool) -> Iterator[DoctorCheck]:
    yield DoctorCheck(
        "ok",
        "octavo",
        f"{__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}",
    )
    yield libraries()
    for package, purpose in OPTIONAL.items():
        if (installed_version := installed(package)) is None:
            yield DoctorCheck(
                "warn", package, f"not installed: pip install {package} for {purpose}"
            )
        else:
            yield DoctorCheck("ok", package, f"{installed_version}: {purpose}")
    yield processor()
    if installed("torch") is None:
        return  # The remaining checks import torch.
    for check in (memory, gpu, backend, embedded, hub):
        yield check()
    if smoke:
        yield generation()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def libraries() -> DoctorCheck:
    versions = {package: installed(package) for package in REQUIRED}
    missing = [package for package, package_version in versions.items() if package_version is None]
    if missing:
        return DoctorCheck("fail", "libraries", f"missing: pip install {' '.join(missing)}")
    return DoctorCheck(
        "ok",
        "libraries",
        ", ".join(f"{package} {package_version}" for package, package_version in versions.items()),
    )


def processor() -> DoctorCheck:
    cpu_info = Path("/proc/cpuinfo")
    cpu_text = cpu_info.read_text() if cpu_info.exists() else ""
    name_match = re.search(r"^model name\s*: (.*)$", cpu_text, re.MULTILINE)
    flags_match = re.search(r"^flags\s*: (.*)$", cpu_text, re.MULTILINE)
    extensions = [
        CPU_EXTENSIONS[flag]
        for flag in CPU_EXTENSIONS
        if flags_match and flag in flags_match[1].split()
    ]
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    cpu_name = name_match[1] if name_match else platform.processor() or platform.machine()
    description = f"{cpu_name}, {cores} cores for this process"
    if flags_match and "AVX2" not in extensions:
        return DoctorCheck("warn", "cpu", f"{description}; no AVX2: generation will be slow")
    return DoctorCheck(
        "ok", "cpu", f"{description}, {', '.join(extensions) or 'vector extensions unknown'}"
    )


def memory() -> DoctorCheck:
    import torch

    from octavo.memory import available_memory

    free, total = available_memory(torch.device("cpu"))
    description = f"{in_bytes(free)} of {in_bytes(total)} available"
    if free < 2**31:
        return DoctorCheck(
            "warn",
            "memory",
            f"{description}: the embedded model needs 2 GiB; close other programs, or lower "
            "--max-model-len",
        )
    return DoctorCheck("ok", "memory", description)


def gpu() -> DoctorCheck:
    import torch

    driver = nvidia_driver()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        device_name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
        description = (
            f"{device_name}, {in_bytes(free)} of {in_bytes(total)} free, "
            f"driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
        )
        if (major, minor) < (8, 0):
            return DoctorCheck(
                "warn", "gpu", f"{description}; it does not support bfloat16: use --dtype float16"
            )
        return DoctorCheck("ok", "gpu", description)
    if driver is None:
        return DoctorCheck("ok", "gpu", "none: no NVIDIA driver is loaded, so the CPU is used")
    if torch.version.cuda is None:
        return DoctorCheck(
            "warn",
            "gpu",
            f"driver {driver} is loaded, but this torch is built for CPUs: install a build for "
            "CUDA",
        )
    return DoctorCheck(
        "warn",
        "gpu",
        f"driver {driver} does not support CUDA {torch.version.cuda}, which torch needs: update "
        "the driver",
    )


def nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    version_match = re.search(r"Kernel Module\D*([\d.]+)", path.read_text())
    return version_match[1] if version_match else None


def backend() -> DoctorCheck:
    import torch

    from octavo.ops.backends import select

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend_name = select(device).name
    if device == "cpu" and not torch.backends.mkldnn.is_available():
        return DoctorCheck(
            "warn",
            "ops",
            f"{backend_name}: torch finds only a CPU and has no oneDNN, so weights are not packed "
            "and generation is slower",
        )
    reason = "torch finds only a CPU; oneDNN packs the weights"
    if device == "cuda":
        reason = "torch can use a GPU"
    return DoctorCheck("ok", "ops", f"{backend_name}: {reason}")


def embedded() -> DoctorCheck:
    from octavo.model import embedded

    try:
        path = embedded.embedded_path()
    except ModelNotFound as error:  # It is optional.
        return DoctorCheck("warn", "model", str(error))
    except OctavoError as error:
        return DoctorCheck("fail", "model", str(error))
    return DoctorCheck(
        "ok",
        "model",
        f"{EMBEDDED} is installed and its checksum is correct ({in_bytes(path.stat().st_size)})",
    )


def hub() -> DoctorCheck:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    model_count = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    cached_models = f"{model_count} model{'s' * (model_count != 1)} in {cache}"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return DoctorCheck("ok", "hub", f"HF_HUB_OFFLINE is set; {cached_models}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    refusal = unreachable(endpoint)
    if refusal is None:
        return DoctorCheck("ok", "hub", f"{endpoint} answers; {cached_models}")
    return DoctorCheck(
        "warn",
        "hub",
        f"{endpoint}: {refusal}. Use local directories or .gguf files; {cached_models}",
    )


def unreachable(url: str) -> str | None:
    """Return why the URL cannot be reached, or None.

    The request runs in a thread, because name resolution has no timeout.
    """
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    problem: list[str | None] = [f"no answer within {HUB_TIMEOUT:g} s"]

    def send_request() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=HUB_TIMEOUT).close()
            problem[0] = None
        except HTTPError as error:  # The hub answered. A missing page is not a problem.
            is_blocked = error.code >= 500 or error.code in (403, 407)
            problem[0] = f"HTTP {error.code}" if is_blocked else None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)  # of a URLError
            text = getattr(reason, "strerror", None) or str(reason)
            problem[0] = "it cannot be reached (" + " ".join(text.split())[:80] + ")"

    thread = threading.Thread(target=send_request, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return problem[0]


def generation() -> DoctorCheck:
    from octavo import LLM, SamplingParams

    started = time.monotonic()
    try:
        llm = LLM(max_num_seqs=1, max_model_len=256, progress=False)
        loaded = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        result = llm.generate("The capital of France is", params, use_tqdm=False)[0]
    except OctavoError as error:
        return DoctorCheck("fail", "smoke", str(error))
    finished = time.monotonic()
    token_ids = result.outputs[0].token_ids
    if len(token_ids) != 5 or result.error:
        return DoctorCheck(
            "fail",
            "smoke",
            f"{len(token_ids)} of 5 tokens were generated: {result.error or 'no error'}. Please "
            "report this",
        )
    timings = f"loaded in {loaded - started:.1f} s, generated in {finished - loaded:.2f} s"
    return DoctorCheck(
        "ok", "smoke", f"5 tokens on {llm.device.type}: {result.outputs[0].text!r}; {timings}"
    )


# ---- a process -----------------------------------------------------------------------------------

COLUMN_FORMATS: dict[str, Callable[[Any], str]] = {
    "role": str,
    "cpu_seconds": lambda seconds: f"{seconds:,.1f}",
    "system_seconds": lambda seconds: f"{seconds:,.1f}",
    "rss_bytes": in_bytes,
    "peak_rss_bytes": in_bytes,
}  # Other columns are whole numbers.


def show_process(pid: int, csv: bool, watch: float | None) -> None:
    """Print what a process uses. A server's engine and worker processes follow its front."""
    if watch is not None and not watch > 0:
        fail(f"--watch must be a positive number of seconds, got {watch:g}")
    started = time.monotonic()
    if not (samples := read_processes(pid)):
        fail(
            f"/proc has no process {pid}: check that it runs on this machine, and that this is "
            "Linux"
        )
    if csv:
        print(",".join(["seconds", *samples[0]]))
    while samples:
        seconds = time.monotonic() - started
        for sample in samples:
            if csv:
                print(",".join([f"{seconds:.1f}", *map(str, sample.values())]), flush=True)
            else:
                print(describe_usage(sample), flush=True)
        if watch is None:
            return
        time.sleep(watch)
        samples = read_processes(pid)


def describe_usage(sample: dict[str, Any]) -> str:
    texts = {
        name: COLUMN_FORMATS[name](value) if name in COLUMN_FORMATS else f"{value:,}"
        for name, value in sample.items()
    }
    return "  ".join(
        text if name == "role" else f"{name.removesuffix('_bytes')} {text}"
        for name, text in texts.items()
    )


def read_processes(pid: int) -> list[dict[str, Any]]:
    """Return the resource use of a process, and of a server's other processes."""
    from octavo.bench.server_profile import find_processes

    if read_usage(pid) is None:
        return []
    processes = []
    for process in find_processes(pid):
        usage = read_usage(process.pid)
        if usage is not None:
            processes.append({"role": process.role, **vars(usage)})
    return processes
