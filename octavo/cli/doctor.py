"""`octavo doctor`: is this machine fit to run Octavo, and what would make it fitter? One line a check.

With --pid: what another process, such as a server, uses of memory and processor, from /proc.
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
from typing import Annotated, NamedTuple

import typer

from octavo import __version__
from octavo.cli.options import command, fail, flag, option
from octavo.cli.terminal import in_bytes
from octavo.errors import OctavoError

HUB_PATIENCE = 2.0  # seconds

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2")
OPTIONAL = {
    "triton": "fast kernels on a GPU",
    "numba": "fast kernels on a CPU",
    "huggingface_hub": "models by their name on the hub",
    "tqdm": "progress bars",
}
FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
}


class DoctorCheck(NamedTuple):
    state: str  # "ok" | "warn" | "fail"
    subject: str
    found: str  # and what to do, where something is to be done


@command
def doctor(
    smoke: Annotated[
        bool, flag("--smoke", "Also generate 5 tokens with the embedded model.")
    ] = False,
    pid: Annotated[
        int | None, option("Show the resource usage of the process with this ID.", "Process", "N")
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
    """DoctorCheck this machine: versions, processor, memory, GPU, models. Exit code 1 if a check fails."""
    if pid is not None:
        observe(pid, csv, watch)
        return
    if csv or watch is not None:
        fail("--csv and --watch are for --pid N")
    failed = False
    for check in checks(smoke):
        failed = failed or check.state == "fail"
        print(colour(check.state), f"{check.subject:<15}", check.found, flush=True)
    if failed:
        raise typer.Exit(1)


def colour(state: str) -> str:
    code = {"ok": 32, "warn": 33, "fail": 31}[state]
    return f"\x1b[{code}m{state:<4}\x1b[0m" if sys.stdout.isatty() else f"{state:<4}"


# ---- checks -----------------------------------------------------------------------------------------------


def checks(smoke: bool) -> Iterator[DoctorCheck]:
    yield DoctorCheck(
        "ok",
        "octavo",
        f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    )
    yield libraries()
    for name, purpose in OPTIONAL.items():
        if (found := installed(name)) is None:
            yield DoctorCheck("warn", name, f"not installed: pip install {name} for {purpose}")
        else:
            yield DoctorCheck("ok", name, f"{found}: {purpose}")
    yield processor()
    if installed("torch") is None:
        return  # what follows imports it
    for check in (memory, gpu, backend, embedded, hub):
        yield check()
    if smoke:
        yield generation()


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def libraries() -> DoctorCheck:
    found = {name: installed(name) for name in REQUIRED}
    if lost := [name for name, number in found.items() if number is None]:
        return DoctorCheck("fail", "libraries", f"missing: pip install {' '.join(lost)}")
    return DoctorCheck(
        "ok", "libraries", ", ".join(f"{name} {number}" for name, number in found.items())
    )


def processor() -> DoctorCheck:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    found = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    has = [FLAGS[flag] for flag in FLAGS if found and flag in found[1].split()]
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    what = f"{name[1] if name else platform.processor() or platform.machine()}, {cores} cores for this process"
    if found and "AVX2" not in has:
        return DoctorCheck("warn", "cpu", f"{what}; no AVX2: generation will be slow")
    return DoctorCheck("ok", "cpu", f"{what}, {', '.join(has) or 'vector extensions unknown'}")


def memory() -> DoctorCheck:
    import torch

    from octavo.memory import available_memory

    free, total = available_memory(torch.device("cpu"))
    found = f"{in_bytes(free)} of {in_bytes(total)} available"
    if free < 2**31:
        return DoctorCheck(
            "warn",
            "memory",
            f"{found}: the embedded model wants 2 GiB; close something, or lower --max-model-len",
        )
    return DoctorCheck("ok", "memory", found)


def gpu() -> DoctorCheck:
    import torch

    driver = nvidia_driver()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
        found = f"{name}, {in_bytes(free)} of {in_bytes(total)} free, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
        if (major, minor) < (8, 0):
            return DoctorCheck("warn", "gpu", f"{found}; without bfloat16: use --dtype float16")
        return DoctorCheck("ok", "gpu", found)
    if driver is None:
        return DoctorCheck("ok", "gpu", "none: no NVIDIA driver is loaded; the CPU is used")
    if torch.version.cuda is None:
        return DoctorCheck(
            "warn",
            "gpu",
            f"driver {driver} is there, but this torch is built for CPUs: install one for CUDA",
        )
    return DoctorCheck(
        "warn",
        "gpu",
        f"driver {driver} does not serve CUDA {torch.version.cuda}, which torch needs: update the driver",
    )


def nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*([\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else None


def backend() -> DoctorCheck:
    import torch

    from octavo.ops import select

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = select(device).name
    if device == "cpu" and not torch.backends.mkldnn.is_available():
        return DoctorCheck(
            "warn",
            "ops",
            f"{name}: torch finds a CPU only and has no oneDNN, so weights are not packed: slower",
        )
    why = (
        "torch can use a GPU"
        if device == "cuda"
        else "torch finds a CPU only; oneDNN packs the weights"
    )
    return DoctorCheck("ok", "ops", f"{name}: {why}")


def embedded() -> DoctorCheck:
    from octavo.model import embedded

    try:
        path = embedded.embedded_path()
    except OctavoError as error:
        return DoctorCheck("fail", "model", str(error))
    return DoctorCheck(
        "ok",
        "model",
        f"{embedded.NAME} is here and its checksum is right ({in_bytes(path.stat().st_size)})",
    )


def hub() -> DoctorCheck:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    have = f"{models} model{'s' * (models != 1)} in {cache}"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return DoctorCheck("ok", "hub", f"HF_HUB_OFFLINE is set; {have}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    refusal = unreachable(endpoint)
    if refusal is None:
        return DoctorCheck("ok", "hub", f"{endpoint} answers; {have}")
    return DoctorCheck(
        "warn", "hub", f"{endpoint}: {refusal}. Use local directories or .gguf files; {have}"
    )


def unreachable(url: str) -> str | None:
    """Why not, or None. In a thread, because looking up a name knows no time limit."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    answer: list[str | None] = [f"no answer within {HUB_PATIENCE:g} s"]

    def knock() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=HUB_PATIENCE).close()
            answer[0] = None
        except HTTPError as error:  # it answered; a page that is not there is none of our concern
            answer[0] = (
                None if error.code < 500 and error.code not in (403, 407) else f"HTTP {error.code}"
            )
        except (OSError, ValueError) as error:
            answer[0] = " ".join(str(error).split())[:80]

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(HUB_PATIENCE)
    return answer[0]


def generation() -> DoctorCheck:
    from octavo import LLM, SamplingParams

    start = time.monotonic()
    try:
        llm = LLM(max_num_seqs=1, max_model_len=256, progress=False)
        loaded = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        result = llm.generate("The capital of France is", params, use_tqdm=False)[0]
    except OctavoError as error:
        return DoctorCheck("fail", "smoke", str(error))
    done = time.monotonic()
    ids = result.outputs[0].token_ids
    if len(ids) != 5 or result.error:
        return DoctorCheck(
            "fail",
            "smoke",
            f"{len(ids)} of 5 tokens came: {result.error or 'without an error'}. Please report it",
        )
    times = f"loaded in {loaded - start:.1f} s, generated in {done - loaded:.2f} s"
    return DoctorCheck(
        "ok", "smoke", f"5 tokens on {llm.device.type}: {result.outputs[0].text!r}; {times}"
    )


# ---- a process --------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[int], str]] = {
    "rss_bytes": in_bytes,
    "peak_rss_bytes": in_bytes,
}  # as people read them; others: as they are


def observe(pid: int, csv: bool, watch: float | None) -> None:
    if watch is not None and not watch > 0:
        fail(f"--watch takes a positive number of seconds, not {watch:g}")
    start = time.monotonic()
    if (sample := read_process(pid)) is None:
        fail(
            f"no process {pid} can be seen in /proc: is it running, on this machine, and is this Linux?"
        )
    if csv:
        print(",".join(["seconds", *sample]))
    while sample is not None:
        seconds = time.monotonic() - start
        if csv:
            print(",".join([f"{seconds:.1f}", *map(str, sample.values())]), flush=True)
        else:
            words = {
                name: COLUMNS[name](value) if name in COLUMNS else f"{value:,}"
                for name, value in sample.items()
            }
            print(
                "  ".join(f"{name.removesuffix('_bytes')} {word}" for name, word in words.items()),
                flush=True,
            )
        if watch is None:
            return
        time.sleep(watch)
        sample = read_process(pid)


def read_process(pid: int) -> dict[str, int] | None:
    """None: there is no such process, or none that may be looked at."""

    def status(path: Path) -> dict[str, str]:
        return dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)

    def count(fields: dict[str, str], name: str) -> int:
        return int(fields.get(name, "0").split()[0])

    try:
        whole = status(Path(f"/proc/{pid}/status"))
        # The process's own file counts the switches of its first thread alone.
        threads = [status(path / "status") for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    if whole.get("State", "Z").split()[0] == "Z":
        return None
    return {
        "pid": pid,
        "rss_bytes": count(whole, "VmRSS") * 1024,
        "peak_rss_bytes": count(whole, "VmHWM") * 1024,
        "threads": count(whole, "Threads"),
        "voluntary_switches": sum(count(t, "voluntary_ctxt_switches") for t in threads),
        "involuntary_switches": sum(count(t, "nonvoluntary_ctxt_switches") for t in threads),
    }
