"""Find the last turn of the user in a prompt with a chat format."""

from __future__ import annotations

import re
from typing import NamedTuple

from headrace.pipeline.wording import beginning, printable

LINE = 80  # at most this many characters name a prompt in a sentence
LABEL = 160  # at most this many characters name a prompt in a list


class ChatFormat(NamedTuple):
    """The special tokens with which a chat template writes turns."""

    mark: str  # the format whose mark comes first in the prompt is used
    begin: str  # the text that begins a turn of the user
    ends: tuple[str, ...]  # texts that end a turn; the first one in the prompt counts


FORMATS = (
    ChatFormat("<|im_start|>", "<|im_start|>user\n", ("<|im_end|>", "<|im_start|>")),  # ChatML, Qwen
    ChatFormat(
        "<|start_header_id|>",  # Llama 3
        "<|start_header_id|>user<|end_header_id|>",
        ("<|eot_id|>", "<|start_header_id|>"),
    ),
    ChatFormat("<|header_start|>", "<|header_start|>user<|header_end|>", ("<|eot|>", "<|header_start|>")),
    ChatFormat("<start_of_turn>", "<start_of_turn>user\n", ("<end_of_turn>", "<start_of_turn>")),  # Gemma
    ChatFormat("[INST]", "[INST]", ("[/INST]",)),  # Mistral, Llama 2
    ChatFormat("<｜User｜>", "<｜User｜>", ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")),
    ChatFormat("<|user|>", "<|user|>", ("<|end|>", "</s>", "<|assistant|>", "<|endoftext|>")),  # Phi, GLM
    ChatFormat("<|start|>", "<|start|>user<|message|>", ("<|end|>", "<|start|>")),  # gpt-oss
    ChatFormat("<|USER_TOKEN|>", "<|USER_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",)),  # Command R
    ChatFormat("<|im_middle|>", "<|im_user|>user<|im_middle|>", ("<|im_end|>",)),  # Kimi
)
SYSTEM = re.compile(r"\s*<<SYS>>.*?<</SYS>>|\s*\[SYSTEM_PROMPT\].*?\[/SYSTEM_PROMPT\]", re.S)
TOOL = "<tool_response>"  # Qwen's template writes the result of a tool as a turn of the user
BARE = re.compile(r"^(system|user|assistant|tool)\n", re.M)
ROLE = re.compile(r"^(system|developer|user|assistant|tool): ?", re.M | re.I)


def last_user_turn(prompt: str) -> str:
    r"""Return the last turn of the user in a prompt; the prompt itself if its format is not known.

    Known formats are the special tokens of ChatML and Qwen, Llama 2, 3 and 4, Mistral, Gemma, DeepSeek, Phi,
    GLM, gpt-oss, Command R and Kimi; lines of ``role: content``, as in older templates and in messages that
    are read as text; and lines with only a role, which ChatML leaves if special tokens are skipped.

    Args:
        prompt: the prompt in the form that the policy got, or in the form of a dump.

    Example:
        >>> last_user_turn("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n")
        '2+2?'
        >>> last_user_turn("user: 2+2?\nassistant: 4\nuser: And 3+3?")
        'And 3+3?'
        >>> last_user_turn("system\nBe brief.\nuser\n2+2?\nassistant\n")
        '2+2?'
    """
    found = [(at, form) for form in FORMATS if (at := prompt.find(form.mark)) >= 0]
    if ROLE.match(prompt.lstrip()):  # even if messages quote special tokens
        found = []
    turns = [] if found else _lines(prompt)
    for part in prompt.split(min(found)[1].begin)[1:] if found else ():
        end = min((at for mark in min(found)[1].ends if (at := part.find(mark)) >= 0), default=len(part))
        turns.append(SYSTEM.sub("", part[:end]).strip())
    said = [turn for turn in turns if turn and not turn.startswith(TOOL)]
    return said[-1] if said else prompt


def asked_line(prompt: str, most: int = LINE) -> str:
    r"""Name a prompt by the beginning of the last turn of the user, on one line.

    Example:
        >>> asked_line("user: What is\n2+2?")
        'What is 2+2?'
    """
    return beginning(" ".join(last_user_turn(prompt).split()), most)


def prompt_label(prompt: object) -> str:
    """Name a prompt, or an id of a prompt, in a list."""
    return printable(asked_line("" if prompt is None else str(prompt), LABEL))


def _lines(prompt: str) -> list[str]:
    """The texts of the user in a prompt of lines with roles; empty if the prompt is not such a chat."""
    starts = list(ROLE.finditer(prompt))
    chat = starts and (not prompt[: starts[0].start()].strip() or prompt.rstrip().endswith("Assistant:"))
    if not chat and re.match(r"(system|user)\n", prompt) and "\nassistant\n" in f"{prompt.rstrip()}\n":
        chat, starts = True, list(BARE.finditer(f"{prompt.rstrip()}\n"))
    if not chat:
        return []
    ends = [start.start() for start in starts[1:]] + [len(prompt)]
    return [
        prompt[start.end() : end].strip()
        for start, end in zip(starts, ends, strict=True)
        if start[1].lower() == "user"
    ]
