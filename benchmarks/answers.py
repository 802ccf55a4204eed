"""Answers of a trained model: an evaluation on labelled rows, and generation with a growing and a static cache."""

import copy
import tempfile
from argparse import Namespace
from functools import partial

import numpy as np
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from arguments.training import FineTuningArguments
from benchmarks.material import benchmark_config, new_model, padded, random_sources, setting_of
from benchmarks.measure import compared, interleaved, timed
from benchmarks.trainers import trainer_flags
from modeling.generation_settings import set_generation_length
from trainer_t5 import T5Trainer

CLASSES, LABEL_LENGTH = 4, 3  # labels, and the tokens of each with its EOS
EVALUATIONS = {
    "run_glue_like": "rows in file order, all padded to --source_length; Seq2SeqTrainer with predict_with_generate",
    "generate": "rows by length, little padding; generate(), greedy, and the loss",
    "ours": "the same batches; all labels scored in one pass",
}


def measure_evaluate(args: Namespace) -> dict:
    """Sequences/s of an evaluation on labelled rows as each of EVALUATIONS does it. Sources are those of
    `random_sources`."""
    model, plain = (new_model(benchmark_config(args.model), ours) for ours in (True, False))
    labels = np.random.default_rng(0).integers(3, model.config.vocab_size - 110, (CLASSES, LABEL_LENGTH))
    labels[:, -1] = model.config.eos_token_id
    sources = random_sources(args.examples, args.source_length, model.config.vocab_size)
    dataset = [dict(input_ids=ids, labels=labels[n % CLASSES].tolist()) for n, ids in enumerate(sources)]
    set_generation_length(model, LABEL_LENGTH)
    plain.generation_config = copy.deepcopy(model.generation_config)
    rows = {name: dict(name=name, what=what, ours=name == "ours") for name, what in EVALUATIONS.items()}
    with tempfile.TemporaryDirectory() as folder:
        flags = trainer_flags(args, folder) | dict(per_device_eval_batch_size=args.batch, predict_with_generate=True)
        ours = T5Trainer(model=model, args=FineTuningArguments(**flags), data_collator=padded)
        ours.class_label_ids = torch.from_numpy(labels)
        collator = partial(padded, source_length=args.source_length)
        peer = Seq2SeqTrainer(model=plain, args=Seq2SeqTrainingArguments(**flags), data_collator=collator)

        def answer(name: str) -> None:
            ours.args.predict_with_generate = name == "generate"
            (peer if name == "run_glue_like" else ours).predict(dataset)

        interleaved(rows, {name: timed(partial(answer, name)) for name in rows}, args.rounds, warm_up=1)
    return setting_of(args) | compared(rows, args.examples)


def measure_generate(args: Namespace) -> dict:
    """Generated tokens/s with a growing cache and with a static one, over which transformers compiles the decoding step
    on a GPU. Every row writes --new_tokens tokens."""
    model = new_model(benchmark_config(args.model), ours=True)
    model.to(args.device, torch.bfloat16 if args.bf16 else None).eval()
    model.generation_config.max_length = None
    source = torch.randint(3, model.config.vocab_size - 110, (args.batch, args.source_length), device=args.device)
    options = dict(min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens, do_sample=False)
    options |= dict(attention_mask=torch.ones_like(source))
    rows = {name: dict(name=name, ours=name == "static") for name in ("dynamic", "static")}

    def generate(name: str) -> None:
        model.generate(source, cache_implementation="static" if name == "static" else None, **options)

    interleaved(rows, {name: timed(partial(generate, name)) for name in rows}, args.rounds, warm_up=2)
    return setting_of(args) | compared(rows, args.batch * args.new_tokens, "tokens_per_second")
