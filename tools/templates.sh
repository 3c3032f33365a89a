#!/usr/bin/env bash
# Copies llama.cpp's chat templates from the sdist of the installed llama-cpp-python to build/templates, for tests/test_families.py.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("llama-cpp-python"))')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/pip download -q --no-deps --no-binary llama-cpp-python -d "$folder" "llama-cpp-python==$version"
mkdir -p build/templates
tar xzf "$folder"/*.tar.gz -C build/templates --strip-components=5 --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'
