"""Which libraries a script does not load, though they are installed: each costs up to seconds before the first answer.

command = command_that_lists("predict_t5.py", "--model_name_or_path", folder, ...)
assert not loaded_in_vain("prediction", subprocess.run(command, ...).stdout)
"""

import sys

_ELSEWHERE = "ctranslate2 evaluate gradio llama_cpp onnxruntime optuna requests sentence_transformers tensorboard wandb"
_OF_METRICS = "nltk rouge_score sacrebleu seqeval sklearn"
_OF_TRAINER = "bitsandbytes datasets matplotlib networkx pandas peft pyarrow"
_OF_SERVER = "fastapi starlette uvicorn"
# transformers' Trainer loads datasets and peft, which loads bitsandbytes and networkx; accelerate loads deepspeed for
# each save; transformers' modelling loads scipy and sympy.
NOT_LOADED = {
    "pre-training": f"{_ELSEWHERE} {_OF_METRICS} {_OF_SERVER}",
    "fine-tuning": f"{_ELSEWHERE} {_OF_METRICS} {_OF_SERVER}",
    "evaluation": f"{_ELSEWHERE} {_OF_METRICS} {_OF_SERVER} matplotlib",
    "export": f"{_ELSEWHERE} {_OF_METRICS} {_OF_SERVER} {_OF_TRAINER}",
    "prediction": f"{_ELSEWHERE} {_OF_METRICS} {_OF_SERVER} {_OF_TRAINER} deepspeed",
    "serving": f"{_ELSEWHERE} {_OF_METRICS} {_OF_TRAINER} deepspeed",
}
_LISTING = """
import atexit, runpy, sys
atexit.register(lambda: print("loaded:", *{name.partition(".")[0] for name in sys.modules}))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command_that_lists(*words: object) -> list[str]:
    """`python *words`, a script and its flags, whose last printed line names the libraries that it has loaded."""
    return [sys.executable, "-c", _LISTING, *map(str, words)]


def loaded_in_vain(job: str, printed: str) -> set[str]:
    """The libraries of NOT_LOADED that a job has loaded all the same. printed: by its `command_that_lists`."""
    title, *loaded = printed.splitlines()[-1].split()
    assert title == "loaded:" and {"torch", "transformers"} <= set(loaded), printed
    return set(loaded).intersection(NOT_LOADED[job].split())
