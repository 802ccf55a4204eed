"""GGUF: export for llama.cpp, whole or the encoder alone, in float32 or 8 bits, and answers by llama.cpp.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats gguf gguf_q8_0 gguf_encoder
    python predict_t5.py --backend gguf --model_name_or_path out/export/gguf_q8_0 --input_file inputs.txt

writing.py writes a file with the gguf package, llama_engine.py compares it, and answers.
"""
