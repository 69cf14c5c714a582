"""From a path to a model that runs: opens the file, checks memory, builds tokenizer, prompts and runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from magnitude_engine import api
from magnitude_engine.config import EngineConfig, Profile
from magnitude_engine.decode.constrain import Constraints
from magnitude_engine.errors import ConfigError, ModelDoesNotFit, ModelNotFound, ModelUnsupported
from magnitude_engine.model import tokenizer as tokenizers
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.graphs import build_runner
from magnitude_engine.model.prompt import PromptEncoder
from magnitude_engine.model.runner import Runner, build_model
from magnitude_engine.model.safetensors import FolderLlama
from magnitude_engine.model.template import ChatTemplate
from magnitude_engine.model.tokenizer import Tokenizer
from magnitude_engine.model.weights import Checkpoint, GgufLlama, LlamaConfig
from magnitude_engine.telemetry import worker_log

MIB = 1024 * 1024


class LoadedModel(NamedTuple):
    """A model ready to serve, and the draft model beside it, where one is named."""

    runner: Runner
    tokenizer: Tokenizer
    prompts: PromptEncoder
    card: api.ModelCard
    constraints: Constraints
    draft: Runner | None = None

    def close(self) -> None:
        """Ends the processes that serve it."""
        self.constraints.close()


class Source(NamedTuple):
    """What a model's files hold, whatever their format."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: str
    weights_hash: str


def load_model(config: EngineConfig, progress: Callable[[float], None] | None = None) -> LoadedModel:
    """Loads the model that `config` names; sets torch's thread count.

    In the packed profile torch is left one thread: compiled code has threads of its own, and torch's would stay awake
    for a while after each small operation and take the processors from them, which doubles the time of a step.

    `progress` is called with the loaded fraction, 0..1.

    Raises:
        ModelNotFound: nothing at the path.
        ModelUnsupported: a format, architecture or tokenizer the engine does not have, or a damaged file.
        ModelDoesNotFit: not enough memory; says both numbers.
        ConfigError: a setting that this model or machine cannot follow.
    """
    torch.set_num_threads(config.threads or _usual_threads())
    profile, device = _placement(config.profile)
    source = _open(Path(config.model_path))
    place = Placement(profile, device, _context(config, source.checkpoint.config))
    model = _load(config, source, place, progress or (lambda fraction: None))
    if profile == "packed":
        torch.set_num_threads(1)
    return model


def _load(config: EngineConfig, source: Source, place: Placement, progress: Callable[[float], None]) -> LoadedModel:
    """Loads the model, and the draft model where one is to be used."""
    if config.draft_model_path is None or not config.drafts:
        return assemble(config, source, place, progress)
    path = Path(config.draft_model_path)
    draft = _open(path)
    check_vocabulary(config, source.tokenizer, draft.tokenizer)
    model = assemble(config, source, place, progress)
    card = msgspec.structs.replace(model.card, draft=path.name if path.is_dir() else path.stem)
    return model._replace(draft=_draft_runner(config, draft, place), card=card)


@cache
def _usual_threads() -> int:
    """Returns how many threads torch uses where nobody has changed it."""
    return torch.get_num_threads()


class Placement(NamedTuple):
    """How and where a model runs; `context` is the number of positions served."""

    profile: Profile
    device: torch.device
    context: int


def assemble(config: EngineConfig, source: Source, place: Placement, progress: Callable[[float], None]) -> LoadedModel:
    """Builds a runnable model from opened files (see `load_model` for errors)."""
    c = source.checkpoint.config
    if source.tokenizer.vocab_size > c.vocab:
        raise ModelUnsupported(
            f"{config.model_path}: the tokenizer has {source.tokenizer.vocab_size} tokens, the model only {c.vocab}; "
            "they are of different models, fetch them again"
        )
    _check_memory(config, c, place)
    template = _template(source)
    model = build_model(source.checkpoint, place.profile, place.context, place.device, progress)
    card = api.ModelCard(
        name=config.model_name,
        architecture="llama",
        context_length=place.context,
        vocab_size=c.vocab,
        profile=place.profile,
        tokenizer_hash=source.tokenizer.fingerprint,
        weights_hash=source.weights_hash,
        parameters=parameter_count(c),
        path=config.model_path,
    )
    runner = build_runner(model, place.profile, place.context, place.device, config.max_batch_size)
    worker_log.info("model %s, profile %s on %s: %s", card.name, card.profile, place.device.type, runner.description)
    prompts = PromptEncoder(source.tokenizer, template)
    constraints = Constraints(source.tokenizer, c.vocab, prompts.tool_format)
    return LoadedModel(runner, source.tokenizer, prompts, card, constraints)


def check_vocabulary(config: EngineConfig, model: Tokenizer, draft: Tokenizer) -> None:
    """Raises ConfigError unless both models mean the same by every token id."""
    if model.fingerprint == draft.fingerprint:
        return
    alike = model.vocab_size == draft.vocab_size and model.special_ids == draft.special_ids
    if alike and all(model.token_bytes(token) == draft.token_bytes(token) for token in range(model.vocab_size)):
        return
    raise ConfigError(
        f"the draft model {config.draft_model_path} has another vocabulary ({draft.vocab_size} tokens) than the model "
        f"{config.model_path} ({model.vocab_size} tokens): take a draft model of the same family, or leave it out",
        param="draft_model_path",
    )


def _draft_runner(config: EngineConfig, source: Source, place: Placement) -> Runner:
    """Builds the draft model; it serves no more positions than it was made for."""
    c = source.checkpoint.config
    mine = place._replace(context=min(place.context, c.context))
    whole = msgspec.structs.replace(config, kv_memory_mb=config.kv_memory_mb + config.draft_kv_mb)
    _check_memory(whole, c, mine)
    model = build_model(source.checkpoint, mine.profile, mine.context, mine.device, lambda share: None)
    runner = build_runner(model, mine.profile, mine.context, mine.device, config.max_batch_size)
    worker_log.info("draft model %s: %s", config.draft_model_path, runner.description)
    return runner


def parameter_count(config: LlamaConfig) -> int:
    """Returns the number of weights, the embeddings counted once."""
    attention = 2 * config.hidden * config.head_dim * (config.heads + config.kv_heads)
    layer = attention + 3 * config.hidden * config.ffn + 2 * config.hidden
    return config.layers * layer + config.vocab * config.hidden + config.hidden


def _open(path: Path) -> Source:
    """Opens a GGUF file or a folder of safetensors."""
    if not path.exists():
        raise ModelNotFound(
            f"no model at {path}; run `magnitude pull smollm2`, or give the path of a GGUF file or a model folder"
        )
    if path.is_dir():
        folder = FolderLlama(path)
        return Source(folder, folder.tokenizer(), folder.template(), folder.fingerprint())
    file = GgufFile.open(path)
    return Source(
        GgufLlama(file), tokenizers.from_gguf(file), file.text("tokenizer.chat_template", ""), file.fingerprint()
    )


def _template(source: Source) -> ChatTemplate:
    """Compiles the model's template with the special tokens it may name."""
    if not source.template:
        raise ModelUnsupported("the model has no chat template; use an instruction-tuned model")
    tokenizer = source.tokenizer
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    special = {name: "" if token is None else tokenizer.token_text(token) for name, token in names.items()}
    return ChatTemplate(source.template, special, clock=datetime.now)


def _placement(profile: Profile | None) -> tuple[Profile, torch.device]:
    """Chooses profile and device; `native` takes the GPU where there is one."""
    gpu = torch.cuda.is_available()
    chosen: Profile = profile or ("native" if gpu else "packed")
    return chosen, torch.device("cuda" if gpu and chosen == "native" else "cpu")


def _context(config: EngineConfig, model: LlamaConfig) -> int:
    wanted = config.context_length
    if wanted is None:
        return model.context
    if wanted > model.context:
        raise ConfigError(
            f"context_length {wanted} is more than this model's {model.context}; lower it", param="context_length"
        )
    return wanted


def _check_memory(config: EngineConfig, model: LlamaConfig, place: Placement) -> None:
    """Raises ModelDoesNotFit when there is no room for weights and cache."""
    per_value = {"reference": 4.0, "packed": 0.8, "native": 2.0}[place.profile]
    embeddings = 2 * model.vocab * model.hidden
    needed = int(parameter_count(model) * per_value) + embeddings + config.kv_memory_mb * MIB
    free = available_memory(place.device)
    if needed > free:
        raise ModelDoesNotFit(
            f"the model needs about {needed // MIB} MiB ({config.kv_memory_mb} of them for keys and values) but "
            f"{free // MIB} MiB are available; use a smaller model or lower kv_memory_mb"
        )


def available_memory(device: torch.device) -> int:
    """Returns the bytes that this process may still use on `device`, container limits included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text("ascii").strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text("ascii")))
    except (OSError, KeyError, ValueError):
        return free  # Not Linux, or no control group: the best figure so far.
    return free
