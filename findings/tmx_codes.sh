#!/bin/sh
# Expected: translate-toolkit gives a segment's words; formatting codes of TMX (bpt, ept, ph) are left out, as those of
#   XLIFF (g, x) are.
# Seen: the codes' content stands in the middle of the words of TMX: "<b>Start</b>". XLIFF's source is words alone.
# Matters for: who makes translation pairs of memories: some of them have markup, and the model learns to write it.
# Versions: translate-toolkit 3.20.4. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="translate-toolkit==3.20.4"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
from translate.storage import tmx, xliff

memory = b"""<?xml version="1.0"?><tmx version="1.4"><header creationtool="a" creationtoolversion="1" o-tmf="x"
segtype="sentence" adminlang="en" srclang="en" datatype="plaintext"/><body><tu><tuv xml:lang="en">
<seg>Press <bpt i="1">&lt;b&gt;</bpt>Start<ept i="1">&lt;/b&gt;</ept> now.</seg></tuv><tuv xml:lang="de">
<seg>Jetzt <bpt i="1">&lt;b&gt;</bpt>Start<ept i="1">&lt;/b&gt;</ept> tippen.</seg></tuv></tu></body></tmx>"""
units = b"""<?xml version="1.0"?><xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file original="a" source-language="en" target-language="de" datatype="plaintext"><body><trans-unit id="1">
<source>Press <g id="1">Start</g> now.</source><target>Jetzt <g id="1">Start</g> tippen.</target>
</trans-unit></body></file></xliff>"""
of_memory = [(str(unit.source), str(unit.target)) for unit in tmx.tmxfile.parsestring(memory, "en", "de").units]
of_units = [(str(unit.source), str(unit.target)) for unit in xliff.xlifffile.parsestring(units).units]
print("TMX:", of_memory)
print("XLIFF:", of_units)
assert of_memory[0][1] == "Jetzt <b>Start</b> tippen." and of_units[0][1] == "Jetzt Start tippen."
END
