"""Trains a byte-level BPE tokenizer for the small models."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> Any:
    """Learn byte-pair merges (Sennrich et al. 2016, arXiv 1508.07909) over bytes (Radford et al. 2019).

    Digits are never merged, so a number has as many tokens as digits. Every text can be encoded and decoded without
    loss. With little data, there are fewer than ``vocab_size`` entries. Ids 0 and 1 are EOS and PAD.

    Returns:
        A ``PreTrainedTokenizerFast`` whose saved form ``AutoTokenizer.from_pretrained`` loads.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
