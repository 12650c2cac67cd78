"""Makes a small model of each family whose tool calls look different, for tests of the parsers that the plan gives.

Called with the folder to fill, from vLLM's own environment. Each is the tiny model's recipe with the family's architecture,
special tokens and what its chat template writes around calls and reasoning.
"""

import dataclasses
import sys
from pathlib import Path

import tiny_model

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart."""

    architecture: str
    tokens: tuple[str, ...]
    tools: str
    """What its template says of tools, where a request has some."""
    end: str = ""
    """What its template writes last."""


FAMILIES = {
    "qwen3": Family(
        "Qwen3",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    ),
    "llama3": Family("Llama", ("<|start_header_id|>", "<|python_tag|>"), "<|start_header_id|>Environment: ipython"),
    "mistral": Family("Mistral", ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]"), "[AVAILABLE_TOOLS] [TOOL_CALLS]"),
    "deepseek": Family(
        "Llama",
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            "<｜tool▁sep｜>",
        ),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    ),
    "qwen3-coder": Family(
        "Qwen3",
        ("<tool_call>", "</tool_call>"),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
}


def make(family: Family, folder: Path) -> None:
    """Writes one model."""
    import torch
    import transformers

    tokenizer = tiny_model.tokenizer()
    tokenizer.add_tokens(list(family.tokens))
    shown = family.tools.replace("'", "\\'")
    tokenizer.chat_template = "{% if tools %}{{ '" + shown.replace("\n", "\\n") + "' }}{% endif %}" + TURNS + family.end
    tokenizer.save_pretrained(folder)
    shape = getattr(transformers, f"{family.architecture}Config")(
        vocab_size=tiny_model.VOCABULARY + 64,
        hidden_size=tiny_model.HIDDEN,
        intermediate_size=2 * tiny_model.HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tiny_model.SPECIAL.index(tiny_model.TURN_ENDS),
        pad_token_id=tiny_model.SPECIAL.index(tiny_model.END_OF_TEXT),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family.architecture}ForCausalLM")(shape).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    for name, family in FAMILIES.items():
        make(family, Path(sys.argv[1]) / name)
