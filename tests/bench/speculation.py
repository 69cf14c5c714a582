"""Tokens per verify step of the drafts from a session's own words and a tenant's past runs, on recorded sessions.

    python tests/bench/speculation.py [--model PATH] [--budgets 4 8 16] [--every 1]

Teacher-forced: every answer of the public traces (`../shared/data/traces/public`) is gone through with the recorded
tokens as what the model says. At each step a draft is proposed from all tokens before it; what it has right is
accepted, and one more token comes from the model, so a step yields accepted + 1. Prompts are rendered and tokenised as
the engine does. Runs are added as their sessions end, in the order of the files, to one corpus for all sources.
Times are medians by the clock. `--every N` takes each Nth session, to be quick.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_engine import api
from magnitude_engine.config import default_data_dir
from magnitude_engine.draft.corpus import RunCorpus
from magnitude_engine.draft.proposer import SuffixProposer
from magnitude_engine.draft.vote import Limits
from magnitude_engine.model import tokenizer as tokenizers
from magnitude_engine.model.gguf import GgufFile
from magnitude_engine.model.prompt import PromptEncoder
from magnitude_engine.model.template import ChatTemplate
from testkit.model import SMOLLM2
from testkit.traces import Trace, public_traces, written

# Prompt tokens before an answer that are kept with it in the corpus.
LEAD = 8


class Answer(NamedTuple):
    """One step of an agent as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Recorded(NamedTuple):
    """One session as token ids."""

    source: str
    answers: tuple[Answer, ...]


class Setting(NamedTuple):
    """What drafts are made from, and how large they are."""

    runs: bool
    limits: Limits

    @property
    def label(self) -> str:
        """The table's words for it."""
        words = "own + runs" if self.runs else "own"
        return f"{words}, {'tree' if self.limits.fork else 'chain'} of {self.limits.nodes}"


@dataclass(slots=True)
class Figures:
    """Sums over the verify steps of one source."""

    tokens: int = 0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    expected: float = 0.0
    propose_s: list[float] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Adds another source's."""
        self.tokens += other.tokens
        self.steps += other.steps
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.expected += other.expected
        self.propose_s += other.propose_s
        self.prompt_s += other.prompt_s


def record(traces: Iterable[Trace], path: Path) -> Iterator[Recorded]:
    """Yields the sessions as token ids of the model in `path`."""
    file = GgufFile.open(path)
    tokenizer = tokenizers.from_gguf(file)
    special = {
        name: "" if token is None else tokenizer.token_text(token)
        for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
    }
    template = ChatTemplate(file.text("tokenizer.chat_template", ""), special, clock=datetime.now)
    prompts = PromptEncoder(tokenizer, template)
    for trace in traces:
        answers = [
            Answer(
                prompts.encode(api.ChatInput(messages=trace.messages[:at], tools=trace.tools)),
                tuple(tokenizer.encode(written(message))),
            )
            for at, message in enumerate(trace.messages)
            if message.role == "assistant" and at
        ]
        yield Recorded(trace.group, tuple(answers))


def replay(answer: Answer, proposer: SuffixProposer, limits: Limits, into: Figures) -> None:
    """Goes through one answer."""
    known = list(answer.prompt)
    end = len(known) + len(answer.answer)
    whole = known + list(answer.answer)
    began = time.perf_counter()
    proposer.begin(known)
    into.prompt_s.append(time.perf_counter() - began)
    while len(known) < end:
        began = time.perf_counter()
        tree = proposer.propose(known, limits)
        into.propose_s.append(time.perf_counter() - began)
        accepted = len(tree.follow(whole[len(known) : end - 1]))
        known.extend(whole[len(known) : len(known) + accepted + 1])
        into.steps += 1
        into.tokens += accepted + 1
        into.accepted += accepted
        into.proposed += len(tree)
        into.expected += tree.expected


def measure(sessions: Sequence[Recorded], setting: Setting) -> dict[str, Figures]:
    """Returns the figures by source, and over all as `all`."""
    figures: dict[str, Figures] = {}
    corpus = RunCorpus() if setting.runs else None
    for session in sessions:
        into = figures.setdefault(session.source, Figures())
        proposer = SuffixProposer(runs=corpus)
        for answer in session.answers:
            replay(answer, proposer, setting.limits, into)
        if corpus is not None:
            for answer in session.answers:
                corpus.add(answer.prompt[-LEAD:] + answer.answer)
    whole = Figures()
    for each in figures.values():
        whole.add(each)
    return {**figures, "all": whole}


def show(setting: Setting, figures: dict[str, Figures]) -> str:
    """Returns a line of the table."""
    whole = figures["all"]
    cells = [f"{each.tokens / each.steps:.2f}" for each in figures.values()]
    cells += [
        f"{100 * whole.accepted / max(whole.proposed, 1):.0f} %",
        f"{whole.expected / whole.steps:.2f} / {whole.accepted / whole.steps:.2f}",
        f"{1e6 * statistics.median(whole.propose_s):.0f}",
        f"{1e3 * statistics.median(whole.prompt_s):.1f}",
    ]
    return f"| {setting.label} | {' | '.join(cells)} |"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_data_dir() / "models" / "smollm2" / SMOLLM2)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    traces = public_traces()[:: options.every]
    if not traces:
        print("skipped: the public traces (../shared/data/traces/public) are not here")
        return 0
    if not options.model.is_file():
        print(f"skipped: {options.model} is not here: run `magnitude pull smollm2`, or name it with --model")
        return 0
    sessions = list(record(traces, options.model))
    answers = sum(len(session.answers) for session in sessions)
    print(f"{len(sessions)} sessions, {answers} answers; {platform.machine()}, {os.cpu_count()} cores\n")
    sources = list(dict.fromkeys(session.source for session in sessions))
    heads = [*sources, "all", "right", "expected / accepted", "µs per draft", "ms per prompt"]
    print(f"| tokens per step | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for runs in (False, True):
        for fork in (False, True):
            for budget in options.budgets:
                setting = Setting(runs, Limits(budget, 24, 0.0, fork))
                print(show(setting, measure(sessions, setting)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
