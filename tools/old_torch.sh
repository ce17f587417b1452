#!/usr/bin/env bash
# An environment of another torch, to be a node of a run with ours: tools/old_torch.sh FOLDER PYTHON TORCH
#
# The index has no small CPU wheels: the wheel is for CUDA, its libraries 5 GB more. Here only the wheel
# is installed and, of the libraries, the two whose symbols an import needs at once; the others are stubs, which on a
# machine without CUDA nobody calls (symbols are bound when first used: TORCH_USE_RTLD_GLOBAL). FOLDER/python runs it.
set -euo pipefail
folder=$1 python=$2 torch=$3
[ "$(cat "$folder/made" 2> /dev/null)" != "$python $torch" ] || exit 0
command -v gcc > /dev/null || { echo "gcc is missing: it makes the stubs (Debian/Ubuntu: apt install gcc)"; exit 1; }
[ ! -e "$folder" ] || [ -e "$folder/pyvenv.cfg" ] || { echo "$folder is there and no environment"; exit 1; }
"$python" -m venv --clear "$folder"
folder=$(cd "$folder" && pwd)
pip="$folder/bin/pip install -q --disable-pip-version-check ${PIP_ARGS:-}"
$pip --no-deps "torch==$torch"
case $torch in  # the major release is what counts
  2.4.* | 2.5.*) cuda=-cu12==12.1.105 ;;
  2.[6-9].* | 2.10.*) cuda=-cu12==12.8.90 ;;
  *) cuda=~=13.0.0 ;;
esac
$pip --no-deps "nvidia-cuda-runtime$cuda" "nvidia-nvtx$cuda"
$pip -c constraints.txt filelock typing_extensions sympy jinja2 fsspec numpy safetensors msgspec networkx xxhash \
  websockets cryptography typer rich psutil zstandard tomli tomli-w uvloop 2> /dev/null
site=$(echo "$folder"/lib/python3*/site-packages)
path="$folder/stubs:$(echo "$site"/nvidia/*/lib | tr ' ' ':'):$site/torch/lib"
mkdir -p "$folder/stubs"
echo "void fusionllm_stub(void) {}" > "$folder/stubs/stub.c"
for _ in 1 2 3; do  # a stub found lets the next missing one be seen
  for file in "$site"/torch/lib/*.so* "$site"/torch/_C*.so; do
    LD_LIBRARY_PATH=$path ldd "$file" 2> /dev/null | awk '/not found/ {print $1}'
  done | sort -u | while read -r library; do
    gcc -shared -fPIC -Wl,-soname,"$library" -o "$folder/stubs/$library" "$folder/stubs/stub.c"
  done
done
cat > "$folder/python" << END
#!/bin/sh
export TORCH_USE_RTLD_GLOBAL=1 LD_LIBRARY_PATH=$path
exec $folder/bin/python -W ignore "\$@"
END
chmod +x "$folder/python"
"$folder/python" -c "import torch; print('old torch', torch.__version__, 'computes', float(torch.ones(2).sum()))"
echo "$python $torch" > "$folder/made"
