"""LoRA: two small matrices trained for each frozen one, through peft; saved as peft's folders, merged when loaded.

    add_low_rank(model, 16, base)     W x -> W x + 2 B A x in all linear layers but the head; A and B are trained
    low_rank_state(model, folder)     A and B of a checkpoint, for the same model
    merged(model, folder)             W + 2 B A instead of W: an ordinary model

(Hu et al. 2021, arXiv 2106.09685.) A folder holds adapter_model.safetensors and adapter_config.json, which names the
checkpoint that the matrices belong to, as peft itself writes and reads them. It has no config.json: beside one,
transformers would look for a whole model there.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from foundry.common.errors import UserError
from foundry.common.reports import difference_of_names, first_line, read_json, record_json, write_json
from foundry.modeling.families import output_head
from foundry.modeling.generation_settings import complete
from foundry.modeling.loading import ODD_JSON
from foundry.modeling.weights import Adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BEFORE = "base_model.model."  # what peft puts before the names of a model's tensors
_CHECKSUM = "base_checksum.json"  # the checksum of the base weights that the matrices were trained with


def add_low_rank(model: PreTrainedModel, rank: int, base: str) -> None:
    """Freezes the model and gives each of its linear layers matrices A [rank, in] and B [out, rank]; B starts at 0.

    base: the checkpoint whose weights these are. The model then saves A and B, the base's absolute path or name on the
    Hub, and the settings of `generate` alone. Its `trained_whole` (`Part`) is trained and saved too, as peft's
    modules_to_save.
    """
    from peft import LoraConfig, inject_adapter_in_model

    unfactored = list(trained_whole(model))
    model.base_checksum = None if model.device.type == "meta" else checksum(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    left_out = {output_head(model), *map(model.get_submodule, unfactored)}
    trained = {n for n, module in linears.items() if module not in left_out and module.weight.requires_grad}
    layers = sorted({name.rpartition(".")[2] for name in trained})
    # Layers of T5Gemma 2's image encoder, which is not trained, have the names of layers that read text.
    others = sorted(name for name in linears.keys() - trained if name.rpartition(".")[2] in layers)
    for layer in linears.values():
        layer.compute_dtype = torch.float32  # peft gives A and B this type
    base = str(Path(base).absolute()) if Path(base).is_dir() else base
    task = "TOKEN_CLS" if unfactored else "FEATURE_EXTRACTION"
    if model.can_generate():
        task = "SEQ_2_SEQ_LM"
    options = dict(base_model_name_or_path=base, task_type=task, exclude_modules=others or None)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, **options)
    inject_adapter_in_model(config, model)
    config.modules_to_save = unfactored or None  # after it, since peft would train copies of them
    for name in unfactored:
        model.get_submodule(name).requires_grad_(True)
    model.save_pretrained, model.read_saved = partial(_save, model), low_rank_state


def trained_whole(model: torch.nn.Module) -> Sequence[str]:
    """The modules that are trained whole beside matrices (`Part`)."""
    return getattr(model, "trained_whole", ())


def _is_saved(model: torch.nn.Module, name: str) -> bool:
    """Whether a folder holds this tensor of the model."""
    return ".lora_" in name or name.startswith(tuple(f"{module}." for module in trained_whole(model)))


def _save(model, folder, state_dict: dict | None = None, is_main_process: bool = True, **_) -> None:
    """Replaces the model's `save_pretrained`. state_dict: the whole model's weights, if the model is sharded."""
    if not is_main_process:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = model.state_dict() if state_dict is None else state_dict
    tensors = {_in_file(name): t.detach().cpu().contiguous() for name, t in state.items() if _is_saved(model, name)}
    save_file(tensors, Path(folder) / WEIGHTS, metadata={"format": "pt"})
    write_json(Path(folder) / _CHECKSUM, {"base_checksum": model.base_checksum})
    model.peft_config["default"].save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def checksum(model: torch.nn.Module) -> float:
    """A number computed from a part of every tensor that a folder does not hold; checkpoints with different weights
    have different ones."""
    weights = [p.detach().flatten()[:64] for name, p in model.named_parameters() if not _is_saved(model, name)]
    return sum(float(part.double().abs().sum()) for part in weights)


def _check_base(found: float, folder: str | Path) -> None:
    """UserError if a folder's matrices were trained with weights of another checksum."""
    expected = read_json(Path(folder) / _CHECKSUM).get("base_checksum", found)
    if not math.isclose(found, expected, rel_tol=1e-5):
        raise UserError(f"{folder}: its LoRA matrices were trained with other base weights than those there now")


def _in_file(name: str) -> str:
    """A tensor's name in peft's files, where adapters have no name of their own."""
    return _BEFORE + name.replace(".default.", ".")


def _unwrapped(name: str) -> str:
    """A name of a file as peft writes it, without what torch.compile, DDP, FSDP or a second PeftModel put into it:
    module.base_model.model._orig_mod.encoder. -> base_model.model.encoder."""
    name = re.sub(r"(?<![^.])(?:_orig_mod|module|_fsdp_wrapped_module)\.", "", name)
    return _BEFORE + re.sub(rf"^(?:{_BEFORE})+", "", name)


def low_rank_state(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """{name in the model: tensor} of a checkpoint's LoRA matrices. UserError if the model has others."""
    _check_base(model.base_checksum, folder)
    state = load_file(folder / WEIGHTS)
    names = {_in_file(name): name for name in model.state_dict() if _is_saved(model, name)}
    if state.keys() != names.keys():
        raise UserError(f"{folder}: its {len(state)} LoRA matrices are not the {len(names)} of this model")
    return {names[name]: tensor for name, tensor in state.items()}


# ---------------------------------------------------------------- a folder of matrices
def base_of(name_or_path: str | Path) -> str | None:
    """The checkpoint that a folder's LoRA matrices belong to; None if the folder holds no adapter. UserError for other
    adapters than LoRA, and for one that names no checkpoint."""
    path = Path(name_or_path) / CONFIG
    if not path.exists():
        return None
    try:
        config = record_json(path)
        kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"--model_name_or_path {name_or_path}: its {CONFIG} cannot be read") from None
    if kind != "LORA" or not base or not (Path(name_or_path) / WEIGHTS).is_file():
        raise UserError(
            f"--model_name_or_path {name_or_path}: the folder holds an adapter ({kind}, made from {base}) that cannot "
            f"be merged. Give a LoRA adapter with its matrices in {WEIGHTS} and the name of its checkpoint in {CONFIG}"
        )
    return base


def root_of(name_or_path: str) -> str:
    """The checkpoint at the end of a chain of folders of LoRA's matrices; a checkpoint itself. UserError for a chain
    that leads back to one of its folders."""
    place, seen = name_or_path, []
    while base := base_of(place):
        seen.append(Path(place).resolve())
        if Path(base).resolve() in seen:
            raise UserError(f"--model_name_or_path {name_or_path}: {place}/{CONFIG} names {base}, its own base")
        place = base
    return place


def with_matrices(model: PreTrainedModel, folder: str | Path, merge: bool = True) -> PreTrainedModel:
    """The model with a folder's LoRA matrices added to its own; without `merge` they stay beside its own, all frozen.

    The merged model can be trained as before. UserError if a matrix is also another layer's, such as T5 v1.0's head,
    which is the embedding: it had no A and B of its own, and adding them would change both layers.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    _check_base(checksum(model), folder)
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    trained, is_tied = [p for p in model.parameters() if p.requires_grad], model.config.tie_word_embeddings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft sets it itself
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")  # see below
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        state = {_unwrapped(name): tensor for name, tensor in load_file(Path(folder) / WEIGHTS).items()}
        _bound(config, state)
        tuned = PeftModel(model, config).eval()
        try:
            report: Any = set_peft_model_state_dict(tuned, state)
            missing = [name.replace(".default.", ".") for name in report.missing_keys if ".lora_" in name]
            unknown = report.unexpected_keys
        except KeyError as error:  # peft looks up what its configuration saves beside the matrices
            missing, unknown = [*error.args], []
        if wrong := difference_of_names(missing, unknown):
            raise UserError(f"{WEIGHTS} is of another kind of model than {type(model).__name__}: {wrong}")
        for name, layer in tuned.named_modules():
            if isinstance(layer, BaseTunerLayer) and users[id(layer.get_base_layer().weight)] > 1:
                raise UserError(f"{name.removeprefix('base_model.model.')} shares its weights with another layer")
        if not merge:
            return tuned.get_base_model()
        merged = tuned.merge_and_unload()
    for parameter in trained:  # peft has frozen them
        parameter.requires_grad_(True)
    merged.config.tie_word_embeddings = is_tied  # peft asks the encoder's embedding; T5Gemma's head is the decoder's
    return merged


def _bound(config: Any, state: dict[str, torch.Tensor]) -> None:
    """Lets peft build no larger matrices than the file has, and match no pattern that could take forever: where the
    configuration chooses layers by a pattern, they are those of the file. UserError for what else it has of both."""
    ranks = {name: len(tensor) for name, tensor in state.items() if re.search(r"\.lora_(embedding_)?A\b", name)}
    rank, most = max([config.r, *config.rank_pattern.values()]), max(ranks.values(), default=1024)
    if rank > most:
        raise UserError(f"{CONFIG} has the rank {rank}, and the matrices of {WEIGHTS} at most {most}")
    if isinstance(config.target_modules, str) and config.target_modules != "all-linear":
        re.compile(config.target_modules)
        config.target_modules = {name.partition(".lora_")[0].removeprefix(_BEFORE) for name in ranks}
    lists = [config.rank_pattern, config.alpha_pattern, config.layers_pattern, config.exclude_modules]
    patterns = [text for found in lists for text in ([found] if isinstance(found, str) else found or ())]
    if slow := [text for text in patterns if not re.fullmatch(r"[\w.^$\\-]*", text)]:
        raise UserError(f"{CONFIG} has the pattern {slow[0]!r:.80}: only names of layers are read there")
    if config.layer_replication:
        raise UserError(f"{CONFIG} has a layer_replication, which is not read")


def load_merged(folder: str, read: Callable[[str], PreTrainedModel], merge: bool, flag: str) -> PreTrainedModel:
    """The checkpoint that a folder names, which `read` reads, with the folder's LoRA matrices merged into it, or beside
    its own as in `merged`; and the folder's settings of `generate`."""
    base = base_of(folder)
    try:
        model = with_matrices(read(base), folder, merge)
    except ImportError:
        raise UserError(
            f"{flag} {folder}: holds LoRA matrices, which need peft: pip install -r requirements/lora.txt"
        ) from None
    except (*ODD_JSON, RuntimeError, re.error) as error:
        raise UserError(
            f"{flag} {folder}: its LoRA matrices belong to {base}, and do not fit what is there ({first_line(error)})"
        ) from None
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
        complete(model)
    return model


class LowRankFolder(Adapter):
    """A folder of LoRA's matrices."""

    config, weights, holds, added = CONFIG, WEIGHTS, "LoRA matrices", ".lora_"

    root_of = staticmethod(root_of)

    def load(self, folder: str, read: Callable, merge: bool, flag: str) -> PreTrainedModel:
        return load_merged(folder, read, merge, flag)
