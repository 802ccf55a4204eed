"""ONNX: a whole T5 with its cache for browsers, or the encoder alone, for ONNX Runtime.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats onnx
    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats onnx_encoder

whole_graph.py and encoder_graph.py write the files, and compare what ONNX Runtime computes with PyTorch.
"""
