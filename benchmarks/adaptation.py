"""How many tokens does an encoder-decoder need: adapted from a decoder, or from scratch? At a tiny scale.

    python -m benchmarks.adaptation --train_file text.jsonl --output results/adaptation.json

For every seed a decoder of Gemma 2's kind (1.0M weights) is trained on the text to predict the next token, and made an
encoder-decoder as adapt_decoder.py does it. pre_train_t5.py then trains that and the same model from scratch, with each
OPTIMIZER:RATE. The decoder's own tokens are not counted, since adaptation begins with an existing decoder. Complete
runs are not repeated. Prints a table, writes it with all curves as JSON, and draws the curves.
"""

import itertools
import math
import shlex
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, set_seed

from benchmarks.settings import SETTINGS, finish, parse, report_pre_training, run
from common.command_line import exit_on_user_error
from corpora.reading import read_documents
from corpora.tokenizers import load_tokenizer, plain_encoder, save_tokenizer, train_tokenizer
from modeling.adaptation import adapt
from modeling.new_vocabulary import embedding_rows

VOCABULARY = 2000
SIZES = dict(hidden_size=96, head_dim=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=288,
             num_hidden_layers=4, sliding_window=64, query_pre_attn_scalar=24)  # fmt: skip
LENGTH, BATCH, RATE = 128, 16, 2e-3  # of the decoder's training: tokens of a row, rows, AdamW's peak
PRE_TRAIN_ARGS = (
    "--objective prefix_lm --input_seq_length 64 --per_device_train_batch_size 32 --gradient_accumulation_steps 1 "
    "--max_steps 300 --eval_steps 25 --warmup_steps 20 --lr_scheduler_type cosine --save_strategy no --num_samples 0 "
    "--max_eval_samples 128 --logging_steps 25 --use_cpu --disable_tqdm"
)
FLAGS = {
    "train_file": dict(required=True, help="Text, as pre_train_t5.py takes it: .jsonl with a column text, or plain."),
    "decoder_steps": dict(type=int, default=500, help=f"Steps of {BATCH} x {LENGTH} tokens."),
    "settings": dict(default=["adamw_torch:1e-3", "adamw_torch:3e-3"], **SETTINGS),
    "target_loss": dict(type=float, help="Not set: the highest final loss of all runs."),
}


def trained_decoder(tokens: np.ndarray, rows: int, steps: int, seed: int) -> PreTrainedModel:
    """A decoder that has read `steps` batches of the flat tokens; rows: of its embedding."""
    set_seed(seed)
    special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)  # <unk>, which no text has, begins a row
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=rows, attn_implementation="eager", **SIZES, **special)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    generator = np.random.default_rng(seed)
    for step in range(steps):
        starts = generator.integers(0, len(tokens) - LENGTH, BATCH)
        batch = torch.from_numpy(tokens[starts[:, None] + np.arange(LENGTH)].astype(np.int64))
        batch[:, 0] = 2
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"decoder, seed {seed}, step {step + 1}: loss {loss.item():.3f}", flush=True)
    return model.eval()


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the study; returns what it writes."""
    args = parse("adaptation", __doc__, FLAGS, PRE_TRAIN_ARGS, argv)
    documents = list(read_documents(Path(args.train_file), "text"))
    if not (args.folder / "tokenizer").is_dir():
        train_tokenizer(documents, args.folder / "tokenizer", VOCABULARY, byte_fallback=True)
    tokenizer = load_tokenizer(str(args.folder / "tokenizer"))
    encoded = plain_encoder(tokenizer)(documents)
    tokens = np.concatenate([np.array([*ids, tokenizer.eos_token_id], np.uint16) for ids in encoded])
    runs = {}  # {start and setting: folders, in the order of the seeds}
    for seed in args.seeds:
        folder = args.folder / f"adapted_{seed}"
        if not (folder / "config.json").is_file():
            decoder = trained_decoder(tokens, embedding_rows(len(tokenizer)), args.decoder_steps, seed)
            save_tokenizer(tokenizer, folder)
            adapt(decoder)[0].save_pretrained(folder)
        starts = {
            "adapted": ["--model_name_or_path", str(folder)],
            "from scratch": ["--config_name", str(folder), "--tokenizer_name", str(folder)],
        }
        for (start, words), setting in itertools.product(starts.items(), args.settings):
            label = f"{start} {setting}".replace(":", " ")
            out = args.folder / f"{label.replace(' ', '_')}_{seed}"
            words_of_run = [*shlex.split(args.pre_train_args), "--train_file", args.train_file, *words]
            run("pre_train_t5.py", setting, seed, out, words_of_run)
            runs.setdefault(label, []).append(out)
    record = report_pre_training(runs, args) | {"decoder_tokens": args.decoder_steps * BATCH * LENGTH}
    return finish(args, record)


if __name__ == "__main__":
    main()
