#!/usr/bin/env bash
# A pronunciation model for your language in twenty minutes: from a list of words to a server and exported folders.
#   bash examples/pronunciation.sh words.tsv out/mine
# Each row of words.tsv is a word, a tab, and its phones with a space between; no header. 800 rows give a model,
# 8,000 a better one (results/pronunciation.md). Every tenth row is held out.
set -euo pipefail
words=$1 out=$2
pairs=(--source_column 0 --target_column 1 --tsv_header false)

mkdir -p "$out"
awk 'NR % 10' "$words" > "$out/train.tsv"
awk 'NR % 10 == 0' "$words" > "$out/held_out.tsv"
cut -f 1 "$out/held_out.tsv" > "$out/held_out.txt"

# A token for each letter and phone; more pairs, made of parts of yours; the model.
python create_tokenizer.py --pieces characters --normalization nfd --train_file "$out/train.tsv" "${pairs[@]}" --output_dir "$out/letters"
python features/recombination/recombine_pairs.py --train_file "$out/train.tsv" "${pairs[@]}" --rows 8000 --output_file "$out/more.tsv"
python fine_tune_t5.py recipes/pronunciation.yaml --train_file "$out/train.tsv" "$out/more.tsv" --validation_file "$out/held_out.tsv" "${pairs[@]}" --tokenizer_name "$out/letters" --config_name tiny --report_to none --output_dir "$out/model"

# The same model for other engines. All three must write the same answers.
python export_checkpoint.py --model_name_or_path "$out/model" --output_dir "$out/export" --formats ctranslate2 onnx
python predict_t5.py --model_name_or_path "$out/model" --input_file "$out/held_out.txt" --output_file "$out/pytorch.jsonl"
python predict_t5.py --backend ctranslate2 --model_name_or_path "$out/export/ctranslate2" --input_file "$out/held_out.txt" --output_file "$out/ctranslate2.jsonl"
python examples/answer_with_onnx.py "$out/export/onnx" < "$out/held_out.txt" > "$out/onnx.jsonl"
cmp "$out/pytorch.jsonl" "$out/ctranslate2.jsonl"
cmp "$out/pytorch.jsonl" "$out/onnx.jsonl"

echo "The answers to $(wc -l < "$out/onnx.jsonl") held-out words are the same in PyTorch, CTranslate2 and ONNX Runtime. A server:"
echo "  python predict_t5.py --serve --model_name_or_path $out/model"
echo "  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"a word\"}'"
