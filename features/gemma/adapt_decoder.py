r"""Make an encoder-decoder from one or two decoder-only checkpoints, as T5Gemma was made from Gemma 2.

    python -m features.gemma.adapt_decoder --model_name_or_path google/gemma-2-2b --output_dir out/t5gemma
    python -m features.gemma.adapt_decoder --model_name_or_path google/gemma-2-2b --encoder google/gemma-2-9b \
        --output_dir out/9b_2b

The encoder's attention is bidirectional. Each layer of the decoder gets a cross-attention: a copy of the layer's
self-attention, or new weights if the encoder has other sizes; train new weights alone first. Writes the model in
T5Gemma's layout, its tokenizer, and adaptation.json, which names the source of each tensor. docs/models.md shows the
benefit. Gemma 2 2B becomes a model of 5.6B parameters; source and result together take 16 GB of memory in bfloat16,
the checkpoint's own type.
"""

import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.machine import run_script
from foundry.common.paths import check_output_dir
from foundry.common.reports import end_summary, human_count, write_json
from foundry.common.whole_folders import made_aside


@dataclass
class AdaptationArguments:
    """What is adapted, and where to."""

    _argument_group_name = "adaptation"

    model_name_or_path: str | None = option(None, "Decoder-only checkpoint for the decoder, or for both halves.")
    encoder: str | None = option(None, "Another checkpoint for the encoder, with the same tokenizer.")
    output_dir: str = option("out/t5gemma", "Folder to write. Must be empty or overwritten.")
    overwrite_output_dir: bool = option(False, "Replace what --output_dir holds, once the new model is complete.")
    seed: int = option(42, "Seed of a new cross-attention.")


FLAGS = [AdaptationArguments]


def check_adaptation(args: AdaptationArguments) -> None:
    """UserError for what cannot work, before any weight is read."""
    if not args.model_name_or_path:
        raise UserError("--model_name_or_path: name the decoder-only checkpoint, such as google/gemma-2-2b")
    check_output_dir(args.output_dir, args.overwrite_output_dir, filter(None, (args.model_name_or_path, args.encoder)))


def described_copies(copied: dict[str, str | None], names: dict[str, str]) -> dict[str, str]:
    """Rows of the summary: where the tensors of each part come from. names: {"encoder": checkpoint, "decoder": ...}."""
    counts: Counter = Counter()
    for name, source in copied.items():
        part = "head" if name.startswith("lm_head") else name.split(".")[1]
        origin = names[source.split()[0]] if source else "new random weights"
        if "cross_attn" in name:
            part, origin = "cross-attention", f"self-attention of {origin}" if source else origin
        counts[part, origin] += 1
    return {part: f"{count} tensor{'s'[: count > 1]}: {origin}" for (part, origin), count in counts.items()}


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict[str, str | None]:
    """Runs the script; returns {tensor: the tensor it was copied from or None}."""
    (args,) = parse_arguments(FLAGS, argv, about=__doc__)
    check_adaptation(args)
    # After the flags were read: --help and mistakes need no torch.
    from transformers import set_seed

    from features.gemma.adaptation import WARM_UP_STEPS, adapt, load_decoder
    from foundry.corpora.tokenizers import load_tokenizer, save_tokenizer
    from foundry.model_t5 import count_parameters
    from foundry.modeling.families import family_of, shape_of
    from foundry.modeling.new_vocabulary import same_vocabulary

    tokenizer = load_tokenizer(args.model_name_or_path, "--model_name_or_path")
    if args.encoder and not same_vocabulary(tokenizer, load_tokenizer(args.encoder, "--encoder")):
        raise UserError(
            f"--encoder {args.encoder}: has another tokenizer than {args.model_name_or_path}. Name two checkpoints "
            "with one tokenizer"
        )
    decoder = load_decoder(args.model_name_or_path, "--model_name_or_path")
    encoder = load_decoder(args.encoder, "--encoder") if args.encoder else None
    set_seed(args.seed)
    model, copied = adapt(decoder, encoder)
    model.generation_config.decoder_start_token_id = family_of(model.config).start_token(model.config)
    with made_aside(Path(args.output_dir), args.overwrite_output_dir) as folder:
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        write_json(folder / "adaptation.json", copied)
    names = {"decoder": args.model_name_or_path, "encoder": args.encoder or args.model_name_or_path}
    rows = {"model": f"{human_count(count_parameters(model))} parameters ({shape_of(model.config).described})"}
    rows |= described_copies(copied, names) | {"written to": args.output_dir}
    follow = "--objective ul2   # or prefix_lm"
    if None in copied.values():
        warm_up = f"--train_only cross_attn --max_steps {WARM_UP_STEPS} --output_dir out/warm"
        follow = f"{warm_up}; then from out/warm, without --train_only"
    rows["next"] = f"python pre_train_t5.py --model_name_or_path {shlex.quote(args.output_dir)} {follow}"
    end_summary(rows, title="adapted")
    return copied


if __name__ == "__main__":
    run_script(main)
