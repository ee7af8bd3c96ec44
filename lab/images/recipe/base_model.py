"""Make the recipe's base model and data set from the documentation of the installed Python packages.

A small Llama learns English from nothing, as Python's and numpy's documentation strings speak it, with a
tokenizer trained on the same texts. Both folders come out as a hub would deliver them. Whatever answers a
held-out question is kept out of the texts. The seed is fixed; other processors round differently, so
weights are alike from one machine to another, not equal.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections import Counter
from pathlib import Path

import numpy
import torch
import transformers
from corpus import Row, rows, share, sources, split, texts, without_answers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODEL, DATA = "tiny-llama", "pydoc-alpaca"
SEED = 20
VOCABULARY, CONTEXT = 2048, 512
BLOCK, BATCH, RATE, WARM_UP = 256, 4, 3e-3, 40
HELD_OUT_TEXTS, HELD_OUT_ROWS = 50, 10  # one in so many
EVALUATED_BLOCKS = 64
BOS, EOS, PAD = "<s>", "</s>", "<pad>"

# What LlamaFactory calls its default template.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Human: ' + message['content'] + '\nAssistant:' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}"
)


def make_tokenizer(found: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(found, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=CONTEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of 1.6 million parameters."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def blocks(tokenizer: PreTrainedTokenizerFast, found: list[str]) -> torch.Tensor:
    """The texts one after another, each between its marks, in rows of equal length."""
    numbers: list[int] = []
    for ids in tokenizer(found, verbose=False)["input_ids"]:
        numbers += [*ids, tokenizer.eos_token_id]
    whole = len(numbers) // BLOCK
    return torch.tensor(numbers[: whole * BLOCK]).view(whole, BLOCK)


def loss_of(model: LlamaForCausalLM, held: torch.Tensor) -> float:
    """Mean loss per token of held-out rows."""
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in held.split(BATCH)]
    return sum(losses) / len(held)


def unigram_loss(train: torch.Tensor, held: torch.Tensor) -> float:
    """The loss of knowing only how frequent each token is: what a model must beat to have learnt language."""
    counts = Counter(train.flatten().tolist())
    total = train.numel() + VOCABULARY
    return sum(-math.log((counts[token] + 1) / total) for token in held.flatten().tolist()) / held.numel()


def fit(model: LlamaForCausalLM, train: torch.Tensor, steps: int) -> None:
    """Train on rows drawn by the seed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARM_UP, steps)
    order = numpy.random.default_rng(SEED)
    model.train()
    for step in range(1, steps + 1):
        batch = train[torch.from_numpy(order.integers(0, len(train), BATCH))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


def write_data(folder: Path, train: list[Row], held: list[Row]) -> None:
    """The data set: two files of alpaca rows and the registry that LlamaFactory reads."""
    folder.mkdir(parents=True)
    registry = {}
    for name, part in (("train", train), ("held_out", held)):
        file = f"{name}.json"
        alpaca = [{"instruction": row.question, "input": "", "output": row.answer} for row in part]
        (folder / file).write_text(json.dumps(alpaca, indent=1) + "\n")
        registry[f"{DATA.replace('-', '_')}_{name}"] = {"file_name": file}
    (folder / "dataset_info.json").write_text(json.dumps(registry, indent=2) + "\n")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Make the recipe's base model and data set.")
    parser.add_argument("out", type=Path, help="folder to make models/ and datasets/ in")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(options.threads)

    library = list(sources(Path(sysconfig.get_path("stdlib"))))
    found = rows(library)
    train_rows, held_rows = split(found, HELD_OUT_ROWS)
    write_data(options.out / "datasets" / DATA, train_rows, held_rows)
    print(f"{len(train_rows)} rows to train on, {len(held_rows)} held out", flush=True)

    packages = Path(numpy.__file__).parents[1]
    files = [*library, *sources(packages, "numpy")]
    known = without_answers(texts(files), held_rows)
    train_texts = [text for text in known if share(text, HELD_OUT_TEXTS)]
    held_texts = [text for text in known if not share(text, HELD_OUT_TEXTS)]
    tokenizer = make_tokenizer(train_texts)
    train, held = blocks(tokenizer, train_texts), blocks(tokenizer, held_texts)[:EVALUATED_BLOCKS]
    print(f"{len(train_texts)} texts, {train.numel()} tokens, {time.monotonic() - started:.0f} s", flush=True)

    model = make_model(tokenizer)
    untrained = loss_of(model, held)
    fit(model, train, options.steps)
    facts = {
        "parameters": model.num_parameters(),
        "tokens_in_corpus": train.numel(),
        "tokens_seen": options.steps * BATCH * BLOCK,
        "loss_uniform": round(math.log(len(tokenizer)), 4),
        "loss_untrained": round(untrained, 4),
        "loss_unigram": round(unigram_loss(train, held), 4),
        "loss": round(loss_of(model, held), 4),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(facts), flush=True)
    if facts["loss"] > facts["loss_unigram"] - 1:
        raise SystemExit(
            f"The model's loss on held-out text is {facts['loss']}; needed at least 1 below that of token "
            f"frequencies alone, {facts['loss_unigram']}. Give it more --steps."
        )

    folder = options.out / "models" / MODEL
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
