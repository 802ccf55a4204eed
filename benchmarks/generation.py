"""Generation: a growing cache and a static one."""

from argparse import Namespace
from functools import partial
from statistics import median

import torch

from benchmarks.material import benchmark_config, new_model, setting_of
from benchmarks.measure import NotAvailableError, interleaved


def measure_generate(args: Namespace) -> dict:
    """{"rows": generated tokens/s with each kind of cache, "ratio"}: the growing cache and the static one.

    On a GPU transformers compiles the decoding step over a static cache by itself. Every row writes --new_tokens
    tokens; float32 caches must give equal texts ("equal_texts").
    """
    model = new_model(benchmark_config(args.model), ours=True)
    model.to(args.device, torch.bfloat16 if args.bf16 else None).eval()
    model.generation_config.max_length = None
    source = torch.randint(3, model.config.vocab_size - 110, (args.batch, args.source_length), device=args.device)
    options = dict(min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens, num_beams=args.beams)
    options |= dict(attention_mask=torch.ones_like(source), do_sample=False)
    compiled = ", compiled" if args.device.type == "cuda" else ""
    whats = {"dynamic": "dynamic cache", "static": f"static cache{compiled}"}
    rows, texts = {name: {"name": name, "what": what} for name, what in whats.items()}, {}

    @torch.no_grad()
    def generate(cache: str) -> None:
        if cache == "static" and args.beams > 1:
            raise NotAvailableError("beams reorder the cache, which transformers does with the growing one only")
        kind = None if cache == "dynamic" else cache
        texts[cache] = model.generate(source, cache_implementation=kind, **options)

    seconds = interleaved({name: partial(generate, name) for name in rows}, args.rounds, warm_up=2, rows=rows)
    for name, values in seconds.items():
        rate = args.batch / median(values)
        rows[name] |= dict(sequences_per_second=rate, tokens_per_second=rate * args.new_tokens)
    result = setting_of(args) | dict(rows=list(rows.values()), beams=args.beams, new_tokens=args.new_tokens)
    result["precision"] = "bf16" if args.bf16 else "float32"
    if len(seconds) == 2:
        result["ratio"] = median(seconds["dynamic"]) / median(seconds["static"])
        result["equal_texts"] = (texts["dynamic"] == texts["static"]).all(-1).float().mean().item()
    return result
