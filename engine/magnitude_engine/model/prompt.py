"""The prompt of a request as token ids: `tokenize(render(messages))`, always, with unchanged text tokenised once.

A client's text must never become a special token, while the template's own markup must. So every special-token
text inside the client's strings is broken by a private-use character that occurs nowhere in the input, the
conversation is rendered, the result is cut at the special tokens that are left, and each plain piece loses the
breaking character before it is tokenised:

    client text   a<|im_end|>b      →  a<¤|im_end|>b
    rendered      <|im_start|>user\\n a<¤|im_end|>b <|im_end|>
    pieces        [1]  "user\\n a<|im_end|>b "  [2]

A piece's ids depend on its text alone, so they are kept, most recently used first, within a bound of bytes.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from magnitude_engine.api import ChatInput, Input, Message, TextInput, TokenInput, Tool, ToolCall
from magnitude_engine.decode.tools import ToolFormat
from magnitude_engine.errors import ContextTooLong, RequestError
from magnitude_engine.model.template import HERMES, ChatTemplate
from magnitude_engine.model.tokenizer import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF900)
CACHE_BYTES = 64 * 1024 * 1024


class PieceCache:
    """Ids by text, least recently used dropped first; thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0

    def get(self, text: str) -> array[int] | None:
        """Returns the ids kept for `text`, or None."""
        with self._lock:
            found = self._entries.get(text)
            if found is not None:
                self._entries.move_to_end(text)
                self.hits += 1
            return found

    def put(self, text: str, ids: array[int]) -> None:
        """Keeps `ids`; text larger than the whole bound is not kept."""
        size = _size(text, ids)
        if size > self._limit:
            return
        with self._lock:
            previous = self._entries.pop(text, None)
            self._held += size - (_size(text, previous) if previous is not None else 0)
            self._entries[text] = ids
            while self._held > self._limit:
                self._held -= _size(*self._entries.popitem(last=False))


class PromptEncoder:
    """Thread-safe.

    Attributes:
        tool_format: the markers with which this model writes a tool call.
    """

    tool_format: ToolFormat = HERMES

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._breaker = _Breaker(tokenizer)
        self.pieces = PieceCache(cache_bytes)

    def encode(self, input: Input, limit: int | None = None) -> tuple[int, ...]:
        """Returns the prompt's ids.

        A text that cannot fit into `limit` ids is refused by its length alone: tokenising it would take seconds
        from everybody else.

        Raises:
            ContextTooLong: the text has more than `limit` ids in any case.
            RequestError: the template refuses the messages, text is not valid Unicode, or an id is out of range.
        """
        self._check_length(input, limit)
        if isinstance(input, ChatInput):
            return self._chat(input)
        if isinstance(input, TextInput):
            return tuple(self._plain(input.text, "prompt"))
        wrong = next((t for t in input.ids if not 0 <= t < self._tokenizer.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token id {wrong} is outside this model's 0..{self._tokenizer.vocab_size - 1}", param="prompt"
            )
        return input.ids

    def _check_length(self, input: Input, limit: int | None) -> None:
        if limit is None or isinstance(input, TokenInput):
            return
        chat = isinstance(input, ChatInput)
        texts = (message.content for message in input.messages) if isinstance(input, ChatInput) else (input.text,)
        fewest = self._tokenizer.fewest(sum(map(len, texts)))
        if fewest > limit:
            raise ContextTooLong(
                f"prompt of at least {fewest} tokens exceeds the context of {limit}; shorten the prompt",
                param="messages" if chat else "prompt",
            )

    def _chat(self, chat: ChatInput) -> tuple[int, ...]:
        if not chat.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        try:
            mark = _unused_character(_strings(chat.messages, chat.tools))
            messages = [self._breaker.message(m, mark) for m in chat.messages]
            rendered = self._template.render(messages, [self._breaker.tool(t, mark) for t in chat.tools])
        except RecursionError:
            raise RequestError("tools hold a schema that nests too deeply; flatten it", param="tools") from None
        ids: list[int] = []
        at = 0
        for match in self._tokenizer.special_pattern.finditer(rendered):
            ids.extend(self._plain(rendered[at : match.start()].replace(mark, ""), "messages"))
            ids.append(self._tokenizer.special_texts[match[0]])
            at = match.end()
        ids.extend(self._plain(rendered[at:].replace(mark, ""), "messages"))
        return tuple(ids)

    def _plain(self, text: str, param: str) -> Iterable[int]:
        """Returns the ids of a piece without special tokens, from the cache where they are known."""
        if not text:
            return ()
        found = self.pieces.get(text)
        if found is None:
            try:
                found = array("i", self._tokenizer.encode(text))
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{param} holds a lone surrogate (U+{ord(text[error.start]):04X}), which is not valid Unicode",
                    param=param,
                ) from error
            self.pieces.put(text, found)
        return found


class _Breaker:
    """Breaks special-token text, and what could join into it at the ends of a string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pattern = tokenizer.special_pattern
        texts = tokenizer.special_texts
        self._heads = frozenset(s[:i] for s in texts for i in range(1, len(s)))
        self._tails = frozenset(s[i:] for s in texts for i in range(1, len(s)))
        self._longest = max(map(len, texts), default=1) - 1

    def text(self, text: str, mark: str) -> str:
        """Returns `text` with `mark` inside every special-token text and at an end that holds a part of one."""
        while self._pattern.search(text):
            text = self._pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)
        reach = range(1, min(self._longest, len(text)) + 1)
        if any(text[:size] in self._tails for size in reach):
            text = mark + text
        if any(text[-size:] in self._heads for size in reach):
            text += mark
        return text

    def message(self, message: Message, mark: str) -> Message:
        """Returns the message with every string of the client broken."""
        calls = tuple(
            ToolCall(id=self.text(c.id, mark), name=self.text(c.name, mark), arguments=self.text(c.arguments, mark))
            for c in message.tool_calls
        )
        return Message(
            role=message.role,
            content=self.text(message.content, mark),
            name=None if message.name is None else self.text(message.name, mark),
            tool_calls=calls,
            tool_call_id=None if message.tool_call_id is None else self.text(message.tool_call_id, mark),
        )

    def tool(self, tool: Tool, mark: str) -> Tool:
        """Returns the tool with every string of its schema broken."""
        return Tool(
            name=self.text(tool.name, mark),
            description=self.text(tool.description, mark),
            parameters={self.text(k, mark): self._schema(v, mark) for k, v in tool.parameters.items()},
        )

    def _schema(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self.text(value, mark)
        if isinstance(value, dict):
            return {self.text(k, mark): self._schema(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._schema(item, mark) for item in value]
        return value


def _strings(messages: Iterable[Message], tools: Iterable[Tool]) -> Iterator[str]:
    """Yields every string of the client."""
    for message in messages:
        yield message.content
        yield message.name or ""
        yield message.tool_call_id or ""
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    for tool in tools:
        yield from (tool.name, tool.description)
        yield from _nested(tool.parameters)


def _nested(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _nested(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested(item)


def _unused_character(strings: Iterable[str]) -> str:
    """Returns a private-use character that none of `strings` holds."""
    used = {c for text in strings if not text.isascii() for c in text}
    free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if free is None:
        raise RequestError("messages use every private-use character U+E000..U+F8FF; remove one", param="messages")
    return free


def _size(text: str, ids: array[int]) -> int:
    """Estimates the bytes that an entry holds."""
    return 4 * len(text) + 4 * len(ids) + 200
