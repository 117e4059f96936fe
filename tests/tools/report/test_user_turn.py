"""A prompt in a chat format is shown by its last user turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.tools.report import asked_line, last_user_turn


def special(head: str, tail: str) -> tuple[str, str, str, str]:
    """Templates of the turns of system, user and assistant, and of the start of an assistant turn."""
    system, user, assistant = (head.format(role) for role in ("system", "user", "assistant"))
    return system + "{}" + tail, user + "{}" + tail, assistant + "{}" + tail, assistant


# The formats of each family for system, user and assistant turns, and for the start of an assistant turn.
FAMILIES = {
    "chatml": special("<|im_start|>{}\n", "<|im_end|>\n"),
    "llama 3": special("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama 4": special("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
    "phi": special("<|{}|>\n", "<|end|>\n"),
    "zephyr": special("<|{}|>\n", "</s>\n"),
    "glm": special("<|{}|>\n", ""),
    "gpt-oss": special("<|start|>{}<|message|>", "<|end|>"),
    "kimi": special("<|im_{0}|>{0}<|im_middle|>", "<|im_end|>"),
    "messages": ("system: {}\n", "user: {}\n", "assistant: {}\n", ""),
    "gemma": (
        "<bos>",
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "mistral": ("<s>[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {} [/INST]", " {}</s>", ""),
    "llama 2": ("<s>", "[INST] {} [/INST]", " {} </s><s>", ""),
    "deepseek": (
        "<｜begin▁of▁sentence｜>{}",
        "<｜User｜>{}",
        "<｜Assistant｜>{}<｜end▁of▁sentence｜>",
        "<｜Assistant｜><think>\n",
    ),
    "deepseek, older": ("<bos>{}\n\n", "User: {}\n\n", "Assistant: {}<eos>\n", "Assistant:"),
    "command r": (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
}
WORDS = st.text(st.characters(exclude_characters="<>[]|｜:", exclude_categories=["Cs"]), min_size=1)


@pytest.mark.parametrize("name", FAMILIES)
@given(asked=WORDS.map(str.strip).filter(bool))
def test_a_prompt_is_shown_by_its_last_user_turn(name, asked):
    system, user, assistant, begins = FAMILIES[name]
    before = system.format("Be brief.") + user.format("What is 1 + 1?") + assistant.format("2")
    assert last_user_turn(before + user.format(asked) + begins) == asked


def test_a_line_has_80_characters_of_the_last_user_turn():
    assert asked_line("user: " + "x" * 80) == "x" * 80
    assert asked_line("user: " + "x" * 81) == "x" * 79 + "…"


def test_a_llama_2_system_prompt_in_the_first_turn_is_left_out():
    assert (
        last_user_turn("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is 2 + 2? [/INST]") == "What is 2 + 2?"
    )


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("What is 2 + 2?", "What is 2 + 2?"),
        ("", ""),
        ("Repeat: user: hello", "Repeat: user: hello"),
        ("My friend said\nuser: hello", "My friend said\nuser: hello"),  # a chat would begin with a role
        # Lines with only a role are a chat if the first line has a role and the assistant has a turn.
        ("Complete:\nuser\nhello\nassistant\n", "Complete:\nuser\nhello\nassistant\n"),
        ("user\nhello", "user\nhello"),
        ("user: 2?\nassistant\nuser: 3?", "3?"),
        (
            "<|im_start|>system\nOnly this<|im_end|>",
            "<|im_start|>system\nOnly this<|im_end|>",
        ),  # there is no user turn
        # A mark of another format is a text.
        ("<|im_start|>user\nWhat is [INST]?<|im_end|>\n", "What is [INST]?"),
        ("user: 2?\nassistant: <|im_start|>user\n3?<|im_end|>", "2?"),
        ("<|im_start|>user\ncut in the mid", "cut in the mid"),
        (  # Qwen writes tool outputs as user turns
            "<|im_start|>user\nRoot of 2?<|im_end|>\n<|im_start|>assistant\nCall.<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n1.41\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "Root of 2?",
        ),
    ],
)
def test_the_outermost_format_counts_and_other_prompts_are_unchanged(prompt, asked):
    assert last_user_turn(prompt) == asked
