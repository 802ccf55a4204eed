"""T5Gemma and T5Gemma 2, and encoder-decoders that are made of a Gemma 2.

    python pre_train_t5.py --model_name_or_path google/t5gemma-b-b-ul2 --train_file my_text.txt --objective ul2
    python -m features.gemma.adapt_decoder --model_name_or_path google/gemma-2-2b --output_dir out/t5gemma

t5gemma.py has both families, adaptation.py the weights of an adapted model, adapt_decoder.py its script.
"""
