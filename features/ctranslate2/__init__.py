"""CTranslate2: export for this engine, in float32 or int8, and answers by it.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats ctranslate2 ctranslate2_int8
    python predict_t5.py --backend ctranslate2 --model_name_or_path out/export --input_file inputs.txt

engine.py has both, encoder_writing.py the encoder alone (`--formats ctranslate2_encoder`).
CTranslate2 ends a beam search by another rule: if the checkpoint generates with beams, the export
prints the number of equal texts too.
"""
