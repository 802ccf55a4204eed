"""T5's attention on library kernels with an exact gradient of the relative bias: `--attn_implementation t5_fused`.

    python pre_train_t5.py --attn_implementation t5_fused --train_file my_text.txt
    python -m experiments.fused_attention.check_attention     # every kernel of this machine against float64

attention.py gives it to transformers, kernel_choice.py chooses among the kernels of library.py, bias_gradient.py and
triton_bias_gradient.py have the gradient. `--speed auto` chooses it on a GPU where dropout is 0.
"""
