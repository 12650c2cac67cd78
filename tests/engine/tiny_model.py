"""Makes a model of five million random weights with its tokenizer, small enough for a CPU to answer at once.

Its words mean nothing, but it is a whole model to vLLM: a Qwen2 with a chat template and 4096 tokens learned from the
source text of packages that install.sh pins, so that the same recipe makes the same model everywhere. Called by
install.sh with the folder to make, from vLLM's own environment; does nothing where this very file made the model there.
"""

import hashlib
import shutil
import sys
from pathlib import Path

CONTEXT = 8192
HIDDEN = 128
# Many, so that a token takes about ten milliseconds: with two layers an answer is over before a test can do anything
# to it, and vLLM's processes wake each other so often that two cores have no time for any other process.
LAYERS = 32
VOCABULARY = 4096
END_OF_TEXT, TURN_BEGINS, TURN_ENDS = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Packages whose sources the tokenizer learns from, and how many files of them: enough for all 4096 tokens.
CORPUS = ("starlette", "click", "jinja2", "networkx/algorithms")
CORPUS_FILES = 150


def corpus() -> list[str]:
    """Source files of pinned packages, in an order that does not depend on the machine."""
    import torch

    packages = Path(torch.__file__).parents[1]
    found = [path for package in CORPUS for path in sorted((packages / package).rglob("*.py"))]
    if len(found) < CORPUS_FILES:
        raise SystemExit(f"only {len(found)} source files in {packages}: run install.sh again")
    return [str(path) for path in found[:CORPUS_FILES]]


def tokenizer():
    """A byte-level BPE tokenizer that ends a turn with `<|im_end|>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    # Whatever the files of a Qwen2 say, transformers takes only their vocabulary and splits text as this does. Real
    # models' files say the same; so must these, or whoever reads them has other tokens than the engine.
    qwen = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen.normalizer, qwen.pre_tokenizer, qwen.decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=TURN_ENDS, pad_token=END_OF_TEXT)
    whole.chat_template = CHAT_TEMPLATE
    return whole


def weights():
    """A deep and narrow Qwen2 with random weights, the same at every call."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(TURN_ENDS),
        pad_token_id=SPECIAL.index(END_OF_TEXT),
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(shape).to(torch.bfloat16)


def check_tokenizer(folder: Path) -> None:
    """Fails where an engine would split text differently from what the tokenizer's file says."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    text = Path(__file__).read_text() + "Größe 123\t\u00e9 e\u0301 <|im_start|>x<|im_end|>  \n\n 世界"
    written = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    if AutoTokenizer.from_pretrained(folder).encode(text) != written:
        raise SystemExit(f"transformers does not read {folder / 'tokenizer.json'} as it is written")


def main(target: Path) -> None:
    """Makes the model in a folder beside the target and moves it there whole."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    made_by = Path("made-by")
    if (target / made_by).exists() and (target / made_by).read_text() == recipe:
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer().save_pretrained(unfinished)
    weights().save_pretrained(unfinished)
    check_tokenizer(unfinished)
    (unfinished / made_by).write_text(recipe)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
