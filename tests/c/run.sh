#!/bin/sh
# Builds the kernel with its test under address and undefined-behaviour sanitizers, and runs it. Needs a C compiler and python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT INT TERM

"${PYTHON:-python3}" "$here/vectors.py" > "$build/vectors.inc"
"${CC:-gcc}" -std=c11 -O1 -g -ffp-contract=off -Wall -Wextra -Wconversion -Werror \
    -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
    -I"$root/csrc" -I"$build" "$root"/csrc/*.c "$here/test_kernel.c" -lm -o "$build/test_kernel"
"$build/test_kernel" "$@"
