"""Train the small tokenizer of the quickstart from the text beside this file: ``python make_tokenizer.py``.

A byte-level BPE of 2048 ids with one special token, ``<|endoftext|>`` (id 0). Byte-level, so any text can be
encoded and comes back unchanged. The same text always gives the same file.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 2048


def main() -> None:
    """Write ``tokenizer.json`` next to this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(HERE / "shakespeare.txt")], trainer)
    tokenizer.save(str(HERE / "tokenizer.json"))
    print(f"wrote tokenizer.json with {tokenizer.get_vocab_size()} ids")


if __name__ == "__main__":
    main()
